/* SPDX-License-Identifier: Apache-2.0
 * How copies become segments and tiles. */
#include "device/kernel_segments.h"
#include "harness.h"

static wsync_copy_t bytes(uint64_t nbytes)
{
    return (wsync_copy_t){
        .row_count = nbytes, .source_item_nbytes = 1, .destination_item_nbytes = 1};
}

static wsync_segment_list_t append(wsync_segments_t *segments, const wsync_copy_t *copy)
{
    wsync_segment_list_t list;
    wsync_error_t err;

    CHECK_OK(wsync_segments_append(segments, copy, 1, &list, &err), err);
    return list;
}

/* The kernel's division, by the numbers that it is given. */
static void check_divisor(const wsync_divisor_t *by, uint32_t value)
{
    const uint32_t high = (uint32_t)((uint64_t)value * by->magic >> 32);

    CHECK_EQ((high + value) >> by->shift, value / by->value);
}

TEST(divisors_are_exact)
{
    wsync_segments_t segments = {0};

    for (uint64_t value = 1; value < (uint64_t)1 << 31; value += 1 + value / 7) {
        wsync_copy_t copy = bytes(1);
        const wsync_divisor_t *by;

        copy.ndim = 2;
        copy.extent[0] = 1;
        copy.extent[1] = (int64_t)value;
        copy.destination_stride[1] = 3;
        (void)append(&segments, &copy);
        if (value == 1) {
            continue; /* an extent of 1 is no dimension */
        }
        by = &segments.items[segments.count - 1].extent[0];
        CHECK_EQ(by->value, value);
        for (uint64_t k = 0; k < 40; k++) {
            const uint64_t edge = ((uint64_t)INT32_MAX / value) * value * k / 40;

            check_divisor(by, (uint32_t)edge);
            check_divisor(by, (uint32_t)(edge / value * value));
            check_divisor(by, (uint32_t)(edge / value * value + value - 1) & INT32_MAX);
        }
        check_divisor(by, INT32_MAX);
    }
    wsync_segments_fini(&segments);
}

/* Every item of every row is in exactly one tile, and no tile is longer than it may be. */
static void check_tiles(const wsync_segment_t *segment, uint32_t tiles)
{
    if (segment->chunks.value == 1) {
        CHECK_EQ(segment->row.value, segment->row_count);
        CHECK(segment->row_count * segment->rows_per_tile <= WSYNC_TILE_NBYTES);
        CHECK(segment->rows_per_tile <= WSYNC_TILE_ROWS);
        CHECK((uint64_t)tiles * segment->rows_per_tile >= segment->row_total);
        CHECK((uint64_t)(tiles - 1) * segment->rows_per_tile < segment->row_total);
    } else {
        CHECK(segment->chunk_count <= WSYNC_TILE_NBYTES);
        CHECK_EQ(segment->chunk_count % WSYNC_TILE_GRAIN, 0);
        CHECK((uint64_t)segment->chunks.value * segment->chunk_count >= segment->row_count);
        CHECK((segment->chunks.value - 1ULL) * segment->chunk_count < segment->row_count);
        CHECK_EQ(tiles, (uint64_t)segment->row_total * segment->chunks.value);
    }
}

TEST(tiles_cover_rows_of_any_length)
{
    wsync_segments_t segments = {0};

    for (uint64_t nbytes = 1; nbytes < (uint64_t)1 << 40; nbytes += 1 + nbytes / 3) {
        for (int64_t rows = 1; rows < 5000; rows = rows * 3 + 1) {
            wsync_copy_t copy = bytes(nbytes);

            copy.ndim = 1;
            copy.extent[0] = rows;
            copy.source_stride[0] = (int64_t)nbytes + 1;
            copy.destination_stride[0] = (int64_t)nbytes;
            if (nbytes > 1 << 24 && rows > 1) {
                continue; /* more tiles than a table has */
            }
            CHECK_EQ(append(&segments, &copy).count, 1);
            check_tiles(&segments.items[segments.count - 1],
                        segments.tile_starts[segments.count] -
                            segments.tile_starts[segments.count - 1]);
            if (segments.tile_starts[segments.count] > 1U << 26) {
                wsync_segments_fini(&segments);
            }
        }
    }
    wsync_segments_fini(&segments);
}

/* The group of every tile leads to a range of segments that holds the tile's own. */
static void check_index(const wsync_segments_t *segments)
{
    const uint32_t *index = segments->tile_index;
    const uint32_t *starts = segments->tile_starts;

    CHECK_EQ(segments->index_count,
             (starts[segments->count] + WSYNC_TILE_GROUP - 1) / WSYNC_TILE_GROUP + 1);
    for (uint32_t i = 0; i < segments->count; i++) {
        for (uint32_t tile = starts[i]; tile < starts[i + 1]; tile++) {
            const uint32_t group = tile / WSYNC_TILE_GROUP;

            CHECK(index[group] <= i && i <= index[group + 1]);
            CHECK(index[group + 1] - index[group] <= WSYNC_TILE_GROUP);
        }
    }
}

TEST(an_index_leads_to_the_segment_of_a_tile)
{
    wsync_segments_t segments = {0};
    wsync_copy_t copies[] = {bytes(1), bytes(1)};
    wsync_segment_list_t list;
    wsync_error_t err;

    for (uint64_t i = 0; i < 300; i++) {
        copies[0] = bytes(i % 7 == 0 ? i * WSYNC_TILE_NBYTES : i + 1);
        (void)append(&segments, copies);
        if (i > 0) {
            check_index(&segments);
        }
        copies[1].ndim = i % 3 == 0 ? 5 : 0; /* now and then no copy */
        (void)wsync_segments_append(&segments, copies, 2, &list, &err);
        if (i > 0) {
            check_index(&segments);
        }
    }
    wsync_segments_fini(&segments);
}

/* A tile of a transposed copy is a square that fills sectors on both sides. */
TEST(transposed_copies_go_in_squares)
{
    wsync_segments_t segments = {0};
    wsync_copy_t copy = bytes(1);
    uint64_t rows = 0;

    copy.source_item_nbytes = copy.destination_item_nbytes = 2;
    copy.ndim = 3;
    for (int d = 0; d < 3; d++) {
        static const int64_t numbers[3][3] = {
            {3, 1 << 20, 1 << 20}, {100, 2, 800}, {200, 2000, 4}};

        copy.extent[d] = numbers[d][0];
        copy.source_stride[d] = numbers[d][1];
        copy.destination_stride[d] = numbers[d][2];
    }
    CHECK_EQ(append(&segments, &copy).count, 9);
    for (size_t i = 0; i < segments.count; i++) {
        rows += segments.items[i].row_total;
    }
    CHECK_EQ(rows, 3 * 100 * 200);
    for (size_t i = 2; i < segments.count; i += 3) {
        const wsync_segment_t *square = &segments.items[i];

        CHECK_EQ(square->rows_per_tile, 1024);
        CHECK_EQ(square->extent[0].value * square->extent[1].value, 1024);
        CHECK_EQ(square->source_stride[0], 2000);
        CHECK_EQ(square->source_stride[1], 2);
        CHECK_EQ(square->extent[1].value, 16);
        CHECK_EQ(square->row_total, 96 * 192);
        CHECK_EQ(square->source_offset, i / 3 << 20);
    }
    copy.extent[0] = 1025; /* too many for segments of their own */
    segments.count = 0;
    CHECK_EQ(append(&segments, &copy).count, 1);
    wsync_segments_fini(&segments);
}

/* A transposed matrix of 2^33 single bytes: more rows than a segment counts. */
TEST(copies_of_too_many_rows_are_split)
{
    wsync_segments_t segments = {0};
    wsync_copy_t copy = bytes(1);
    wsync_segment_list_t list;
    uint64_t rows = 0;

    copy.ndim = 2;
    copy.extent[0] = 1 << 17;
    copy.extent[1] = 1 << 16;
    copy.source_stride[0] = 1;
    copy.source_stride[1] = 1 << 17;
    copy.destination_stride[0] = 1 << 16;
    copy.destination_stride[1] = 1;
    list = append(&segments, &copy);
    CHECK(list.count > 1);
    for (uint32_t i = 0; i < list.count; i++) {
        /* Halves of the longer side, twice, and then of the other. */
        const uint64_t row = (uint64_t)(i / 2) << 15;
        const uint64_t column = (uint64_t)(i % 2) << 15;

        CHECK_EQ(segments.items[i].destination_offset, row << 16 | column);
        CHECK_EQ(segments.items[i].source_offset, column << 17 | row);
        rows += segments.items[i].row_total;
        check_tiles(&segments.items[i],
                    segments.tile_starts[i + 1] - segments.tile_starts[i]);
    }
    CHECK_EQ(rows, (uint64_t)1 << 33);
    CHECK_EQ(list.tile_count, ((uint64_t)1 << 33) / WSYNC_TILE_ROWS);
    wsync_segments_fini(&segments);
}

TEST(grids_hold_no_more_blocks_than_stay_resident)
{
    wsync_segment_list_t list = {.tile_count = 1};

    CHECK_EQ(wsync_segments_grid(&list, 132), 1);
    list.tile_count = 17;
    CHECK_EQ(wsync_segments_grid(&list, 132), 2);
    list.tile_count = 1000000;
    CHECK_EQ(wsync_segments_grid(&list, 132), 264);
}
