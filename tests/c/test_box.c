/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/box.h"
#include "harness.h"

static wsync_box_t square(int64_t row, int64_t column, int64_t rows, int64_t columns)
{
    const int64_t shape[2] = {rows, columns};
    wsync_box_t box = wsync_box_whole(2, shape);

    box.start[0] = row;
    box.start[1] = column;
    return box;
}

TEST(whole_box_counts_elements)
{
    const int64_t shape[3] = {2, 3, 4};
    const int64_t empty[2] = {2, 0};
    wsync_box_t box = wsync_box_whole(3, shape);

    CHECK_EQ(wsync_box_count(&box), 24);
    CHECK_EQ(box.extent[WSYNC_MAX_NDIM - 1], 1);
    box = wsync_box_whole(0, NULL);
    CHECK_EQ(wsync_box_count(&box), 1);
    box = wsync_box_whole(2, empty);
    CHECK_EQ(wsync_box_count(&box), 0);
}

TEST(intersection_is_the_common_part)
{
    const wsync_box_t a = square(0, 0, 4, 4);
    const wsync_box_t b = square(2, 3, 4, 4);
    const wsync_box_t expected = square(2, 3, 2, 1);
    wsync_box_t common;

    CHECK(wsync_box_intersect(&a, &b, &common));
    CHECK(wsync_box_equal(&common, &expected));
    CHECK(!wsync_box_equal(&common, &a));
}

TEST(touching_boxes_do_not_meet)
{
    const wsync_box_t a = square(0, 0, 4, 4);
    const wsync_box_t b = square(4, 0, 4, 4);
    const wsync_box_t empty = square(1, 1, 0, 2);
    wsync_box_t common = square(7, 7, 7, 7);
    const wsync_box_t before = common;

    CHECK(!wsync_box_intersect(&a, &b, &common));
    CHECK(!wsync_box_intersect(&a, &empty, &common));
    CHECK(wsync_box_equal(&common, &before));
}

/* Every cell of a 5 x 5 square is in exactly one of the hole and the pieces, for every
 * hole. */
TEST(subtraction_leaves_disjoint_pieces)
{
    const wsync_box_t whole = square(0, 0, 5, 5);
    int checked = 0;

    for (int code = 0; code < 5 * 5 * 6 * 6; code++) {
        const int row = code % 5;
        const int column = code / 5 % 5;
        const wsync_box_t hole = square(row, column, code / 25 % 6, code / 150);
        wsync_box_t pieces[2 * WSYNC_MAX_NDIM + 1];
        unsigned count;

        if (wsync_box_count(&hole) == 0 || row + hole.extent[0] > 5 ||
            column + hole.extent[1] > 5) {
            continue;
        }
        count = wsync_box_subtract(&whole, &hole, pieces);
        pieces[count++] = hole;
        for (int cell = 0; cell < 25; cell++) {
            const wsync_box_t one = square(cell % 5, cell / 5, 1, 1);
            int owners = 0;

            for (unsigned i = 0; i < count; i++) {
                wsync_box_t common;

                owners += wsync_box_intersect(&pieces[i], &one, &common);
            }
            CHECK_EQ(owners, 1);
        }
        checked++;
    }
    CHECK_EQ(checked, 15 * 15);
}
