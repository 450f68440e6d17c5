/* SPDX-License-Identifier: Apache-2.0 */
#include "core/box_cover.h"

#include "harness.h"

enum { SIDE = 6 };

/* How often each element of a square was served, and how many parts that took. */
typedef struct served {
    unsigned times[SIDE][SIDE];
    unsigned parts;
    unsigned limit;
} served_t;

static wsync_box_t box(int64_t row, int64_t column, int64_t rows, int64_t columns)
{
    const int64_t shape[2] = {rows, columns};
    wsync_box_t made = wsync_box_whole(2, shape);

    made.start[0] = row;
    made.start[1] = column;
    return made;
}

static wsync_status_t serve(void *context, const wsync_box_t *part)
{
    served_t *served = context;

    if (served->parts == served->limit) {
        return WSYNC_ERR_LAYOUT;
    }
    served->parts++;
    for (int64_t i = 0; i < part->extent[0]; i++) {
        for (int64_t j = 0; j < part->extent[1]; j++) {
            served->times[part->start[0] + i][part->start[1] + j]++;
        }
    }
    return WSYNC_OK;
}

TEST(every_element_is_served_once_by_the_first_box_that_holds_it)
{
    const wsync_box_t whole = box(0, 0, SIDE, SIDE);
    const wsync_box_t offered[] = {box(2, 2, 2, 2), box(1, 0, 4, 3), box(0, 0, 0, 0),
                                   box(0, 0, SIDE, SIDE - 1)};
    wsync_cover_t cover = {0};
    served_t served = {.limit = 100};
    wsync_error_t err = {0};
    uint64_t missing = 0;

    CHECK_OK(wsync_cover_start(&cover, &whole, &err), err);
    for (size_t i = 0; i < sizeof(offered) / sizeof(offered[0]); i++) {
        CHECK_OK(wsync_cover_offer(&cover, &offered[i], serve, &served, &err), err);
    }
    for (int i = 0; i < SIDE; i++) {
        for (int j = 0; j < SIDE; j++) {
            CHECK_EQ(served.times[i][j], j < SIDE - 1 ? 1 : 0);
        }
    }
    for (size_t i = 0; i < cover.missing.count; i++) {
        CHECK_EQ(cover.missing.items[i].start[1], SIDE - 1);
        missing += wsync_box_count(&cover.missing.items[i]);
    }
    CHECK_EQ(missing, SIDE);
    CHECK_OK(wsync_cover_offer(&cover, &whole, serve, &served, &err), err);
    CHECK_EQ(cover.missing.count, 0);
    CHECK_EQ(served.times[0][SIDE - 1], 1);
    wsync_cover_fini(&cover);
}

TEST(a_box_can_be_refused)
{
    const wsync_box_t whole = box(0, 0, SIDE, SIDE);
    const wsync_box_t middle = box(2, 2, 2, 2);
    wsync_cover_t cover = {0};
    served_t served = {.limit = 1};
    wsync_error_t err = {0};

    CHECK_OK(wsync_cover_start(&cover, &whole, &err), err);
    CHECK_OK(wsync_cover_offer(&cover, &middle, serve, &served, &err), err);
    CHECK_EQ(wsync_cover_offer(&cover, &whole, serve, &served, &err), WSYNC_ERR_LAYOUT);
    CHECK_EQ(served.parts, 1);
    CHECK_OK(wsync_cover_start(&cover, &middle, &err), err);
    CHECK_EQ(cover.missing.count, 1);
    wsync_cover_fini(&cover);
}
