/* SPDX-License-Identifier: Apache-2.0 */
#include "device/kernel_segments.h"

#include <stdbool.h>
#include <stdlib.h>

#include "core/base/array.h"
#include "core/base/divide.h"

enum {
    /* A fill is worth a path of its own if its rows hold some vectors for every lane. */
    FILL_MIN_NBYTES = 512,
    /* What a GPU reads from its memory at once. */
    SECTOR_NBYTES = 32,
    /* Segments that one transposed copy becomes at most. */
    MAX_TURNED = 1 << 10,
};

_Static_assert((int)WSYNC_SEGMENT_F32_TO_BF16 == (int)WSYNC_TRANSFORM_F32_TO_BF16 &&
                   (int)WSYNC_SEGMENT_F16 == (int)WSYNC_TRANSFORM_F16,
               "the kernel numbers the transforms in another order");

/* The kernel counts rows and tiles in 31 bits. */
static const uint64_t count_limit = (uint64_t)1 << 31;

void wsync_segments_fini(wsync_segments_t *segments)
{
    free(segments->items);
    free(segments->tile_starts);
    free(segments->tile_index);
    *segments = (wsync_segments_t){0};
}

wsync_divisor_t wsync_divisor(uint32_t value)
{
    uint32_t shift = 0;
    uint64_t missing;

    while (((uint64_t)1 << shift) < value) {
        shift++;
    }
    missing = ((uint64_t)1 << shift) - value;
    return (wsync_divisor_t){value, (uint32_t)((missing << 32) / value + 1), shift};
}

/* The dimension along which a copy repeats the same few bytes, if it is a fill with long
 * rows; else -1. */
static int fill_dim(const wsync_copy_t *copy)
{
    const int64_t period = copy->source_item_nbytes;
    int found = -1;

    if (copy->transform != WSYNC_TRANSFORM_NONE || copy->row_count != 1 || period < 1 ||
        period > 16 || (period & (period - 1)) != 0) {
        return -1;
    }
    for (int d = 0; d < (int)copy->ndim; d++) {
        if (copy->extent[d] == 1) {
            continue;
        }
        if (copy->source_stride[d] != 0) {
            return -1;
        }
        if (copy->destination_stride[d] == period &&
            copy->extent[d] >= FILL_MIN_NBYTES / period) {
            found = d;
        }
    }
    return found;
}

/* Rows in items: bytes where nothing is converted. */
static void describe_row(const wsync_copy_t *copy, int fill, wsync_segment_t *segment)
{
    const uint64_t nbytes = copy->row_count * copy->source_item_nbytes;

    segment->kind = fill >= 0 ? WSYNC_SEGMENT_FILL : copy->transform;
    segment->row_count = copy->row_count;
    segment->source_item_nbytes = copy->source_item_nbytes;
    segment->destination_item_nbytes = copy->destination_item_nbytes;
    if (fill >= 0) {
        segment->row_count = nbytes * (uint64_t)copy->extent[fill];
        segment->destination_item_nbytes = 1;
    } else if (segment->kind == WSYNC_SEGMENT_COPY) {
        segment->row_count = nbytes;
        segment->source_item_nbytes = 1;
        segment->destination_item_nbytes = 1;
    }
}

/* The dimensions that move something, the fastest first.  Returns the number of rows. */
static uint64_t describe_dims(const wsync_copy_t *copy, int fill, wsync_segment_t *segment)
{
    uint64_t rows = 1;

    for (int d = (int)copy->ndim - 1; d >= 0; d--) {
        const unsigned at = segment->ndim;

        if (d == fill || copy->extent[d] == 1) {
            continue;
        }
        segment->source_stride[at] = copy->source_stride[d];
        segment->destination_stride[at] = copy->destination_stride[d];
        if (at < WSYNC_KERNEL_NDIM - 1) {
            segment->extent[at] = wsync_divisor((uint32_t)copy->extent[d]);
        }
        rows *= (uint64_t)copy->extent[d];
        segment->ndim++;
    }
    return rows;
}

/* Cuts a segment into tiles and returns how many there are. */
static uint64_t cut_tiles(wsync_segment_t *segment)
{
    /* Casts have at most 4 bytes on the wider side. */
    const uint64_t limit =
        segment->kind == WSYNC_SEGMENT_COPY || segment->kind == WSYNC_SEGMENT_FILL
            ? WSYNC_TILE_NBYTES
            : WSYNC_TILE_NBYTES / 4;

    segment->chunks = wsync_divisor(1);
    if (segment->row_count <= limit) {
        const uint64_t rows = limit / segment->row_count;

        segment->rows_per_tile =
            (uint32_t)(rows < WSYNC_TILE_ROWS ? rows : WSYNC_TILE_ROWS);
        segment->row = wsync_divisor((uint32_t)segment->row_count);
        return wsync_ceil_divide(segment->row_total, segment->rows_per_tile);
    }
    /* Equal chunks, so that a row that is a little longer than a tile leaves no crumb. */
    segment->chunk_count =
        (uint32_t)wsync_ceil_divide(
            wsync_ceil_divide(segment->row_count,
                              wsync_ceil_divide(segment->row_count, limit)),
            WSYNC_TILE_GRAIN) *
        WSYNC_TILE_GRAIN;
    if (wsync_ceil_divide(segment->row_count, segment->chunk_count) >= count_limit) {
        return count_limit;
    }
    segment->chunks = wsync_divisor(
        (uint32_t)wsync_ceil_divide(segment->row_count, segment->chunk_count));
    return (uint64_t)segment->row_total * segment->chunks.value;
}

static wsync_status_t reserve(wsync_segments_t *segments, wsync_error_t *err)
{
    void *grown = wsync_array_reserve(segments->items, &segments->item_capacity,
                                      segments->count + 1, sizeof(*segments->items));

    if (grown != NULL) {
        segments->items = grown;
        grown = wsync_array_reserve(segments->tile_starts, &segments->start_capacity,
                                    segments->count + 2, sizeof(*segments->tile_starts));
    }
    if (grown == NULL) {
        return wsync_no_memory(err, "segments");
    }
    segments->tile_starts = grown;
    if (segments->count == 0) {
        segments->tile_starts[0] = 0;
    }
    return WSYNC_OK;
}

/* Groups that begin before this tile. */
static size_t groups_before(uint64_t tile)
{
    return (size_t)wsync_ceil_divide(tile, WSYNC_TILE_GROUP);
}

/* Notes the segment that is about to be appended, and ends before tile `tiles`, for the
 * groups whose first tile is its own, and in the entry behind them all. */
static wsync_status_t index_tiles(wsync_segments_t *segments, uint64_t tiles,
                                  wsync_error_t *err)
{
    const size_t groups = groups_before(tiles);
    uint32_t *grown = wsync_array_reserve(segments->tile_index, &segments->index_capacity,
                                          groups + 1, sizeof(*grown));

    if (grown == NULL) {
        return wsync_no_memory(err, "segments");
    }
    segments->tile_index = grown;
    for (size_t i = groups_before(segments->tile_starts[segments->count]); i <= groups;
         i++) {
        grown[i] = (uint32_t)segments->count;
    }
    segments->index_count = groups + 1;
    return WSYNC_OK;
}

/* Appends a copy of fewer than 2^31 rows. */
static wsync_status_t append_segment(wsync_segments_t *segments, const wsync_copy_t *copy,
                                     size_t index, wsync_error_t *err)
{
    const int fill = fill_dim(copy);
    wsync_segment_t segment = {
        .source_offset = copy->source_offset,
        .destination_offset = copy->destination_offset,
        .source_buffer = copy->source_buffer,
        .destination_buffer = copy->destination_buffer,
        .scale = copy->affine.scale,
        .offset = copy->affine.offset,
    };
    wsync_status_t status = reserve(segments, err);
    uint64_t tiles;

    if (status != WSYNC_OK) {
        return status;
    }
    describe_row(copy, fill, &segment);
    segment.row_total = (uint32_t)describe_dims(copy, fill, &segment);
    tiles = cut_tiles(&segment) + segments->tile_starts[segments->count];
    if (tiles >= count_limit) {
        return wsync_fail(
            err, WSYNC_ERR_INVALID, 0, "segments",
            "copy %zu: its rows of %llu elements need 2^31 tiles or more, too "
            "many for a launch",
            index, (unsigned long long)copy->row_count);
    }
    status = index_tiles(segments, tiles, err);
    if (status != WSYNC_OK) {
        return status;
    }
    segments->items[segments->count++] = segment;
    segments->tile_starts[segments->count] = (uint32_t)tiles;
    return WSYNC_OK;
}

/* Rows of a copy, or the limit if there are as many or more. */
static uint64_t count_rows(const wsync_copy_t *copy)
{
    uint64_t rows = 1;

    for (unsigned d = 0; d < copy->ndim; d++) {
        if (copy->extent[d] <= 0) {
            return 0;
        }
        if (__builtin_mul_overflow(rows, (uint64_t)copy->extent[d], &rows) ||
            rows > count_limit) {
            rows = count_limit;
        }
    }
    return rows;
}

/* The dimension along which the rows of a transposed copy fill sectors of the source,
 * though they are far from each other in the order in which they are written; else -1. */
static int turned_dim(const wsync_copy_t *copy)
{
    const uint64_t nbytes = copy->row_count * copy->source_item_nbytes;
    const int fastest = (int)copy->ndim - 1;
    uint64_t around = 1; /* in other dimensions */
    int found = -1;

    for (int d = 0; d < fastest; d++) {
        if (found < 0 && (uint64_t)copy->source_stride[d] == nbytes) {
            found = d;
        } else if (around <= MAX_TURNED) {
            around *= (uint64_t)copy->extent[d];
        }
    }
    if (found < 0 || 2 * nbytes > SECTOR_NBYTES || around > MAX_TURNED ||
        (uint64_t)copy->source_stride[fastest] < SECTOR_NBYTES ||
        copy->extent[found] < (int64_t)(SECTOR_NBYTES / nbytes) ||
        copy->extent[fastest] < (int64_t)(WSYNC_TILE_ROWS * nbytes / SECTOR_NBYTES)) {
        return -1;
    }
    return found;
}

/* The part of a copy from index `first` of a dimension on, `count` long. */
static wsync_copy_t part_of(const wsync_copy_t *copy, unsigned dim, int64_t first,
                            int64_t count)
{
    wsync_copy_t part = *copy;

    part.source_offset += (uint64_t)first * (uint64_t)copy->source_stride[dim];
    part.destination_offset += (uint64_t)first * (uint64_t)copy->destination_stride[dim];
    part.extent[dim] = count;
    return part;
}

/* Has every tile of a transposed copy read whole sectors and write whole ones: the rows of
 * a tile are a square of its two dimensions.  What is left at their ends goes as it is. */
static wsync_status_t append_turned(wsync_segments_t *segments, const wsync_copy_t *copy,
                                    unsigned column, size_t index, wsync_error_t *err)
{
    const int64_t nbytes = (int64_t)(copy->row_count * copy->source_item_nbytes);
    const int64_t edge[2] = {SECTOR_NBYTES / nbytes,
                             WSYNC_TILE_ROWS * nbytes / SECTOR_NBYTES};
    wsync_copy_t square = *copy;
    wsync_status_t status = WSYNC_OK;

    const unsigned other = column == 0 ? 1 : 0;

    for (int64_t i = 0; i < copy->extent[other] && copy->ndim > 2; i++) {
        wsync_copy_t plane = part_of(copy, other, i, 1);

        plane.ndim--;
        for (unsigned k = other; k < plane.ndim; k++) {
            plane.extent[k] = copy->extent[k + 1];
            plane.source_stride[k] = copy->source_stride[k + 1];
            plane.destination_stride[k] = copy->destination_stride[k + 1];
        }
        status = append_turned(segments, &plane, column - (other < column), index, err);
        if (status != WSYNC_OK || i + 1 == copy->extent[other]) {
            return status;
        }
    }
    for (unsigned k = 0; k < 2 && status == WSYNC_OK; k++) {
        const int64_t whole = copy->extent[k] / edge[k] * edge[k];
        const wsync_copy_t rest = part_of(&square, k, whole, copy->extent[k] - whole);

        square.extent[k] = whole;
        if (rest.extent[k] > 0) {
            status = append_segment(segments, &rest, index, err);
        }
    }
    square.ndim = 4;
    for (unsigned k = 0; k < 2; k++) {
        square.extent[k] /= edge[k];
        square.extent[2 + k] = edge[k];
        square.source_stride[2 + k] = copy->source_stride[k];
        square.source_stride[k] = copy->source_stride[k] * edge[k];
        square.destination_stride[2 + k] = copy->destination_stride[k];
        square.destination_stride[k] = copy->destination_stride[k] * edge[k];
    }
    return status == WSYNC_OK ? append_segment(segments, &square, index, err) : status;
}

/* Halves a copy along its longest dimension until its rows can be counted. */
static wsync_status_t append_copy(wsync_segments_t *segments, const wsync_copy_t *copy,
                                  size_t index, wsync_error_t *err)
{
    const uint64_t rows = count_rows(copy);
    const int turned = turned_dim(copy);
    wsync_copy_t half;
    unsigned longest = 0;
    wsync_status_t status;

    if (rows == 0 || copy->row_count == 0) {
        return WSYNC_OK;
    }
    if (rows < count_limit && turned >= 0) {
        return append_turned(segments, copy, (unsigned)turned, index, err);
    }
    if (rows < count_limit) {
        return append_segment(segments, copy, index, err);
    }
    for (unsigned d = 1; d < copy->ndim; d++) {
        longest = copy->extent[d] > copy->extent[longest] ? d : longest;
    }
    half = part_of(copy, longest, 0, copy->extent[longest] / 2);
    status = append_copy(segments, &half, index, err);
    if (status != WSYNC_OK) {
        return status;
    }
    half = part_of(copy, longest, half.extent[longest],
                   copy->extent[longest] - half.extent[longest]);
    return append_copy(segments, &half, index, err);
}

static wsync_status_t check_copy(const wsync_copy_t *copy, size_t index, wsync_error_t *err)
{
    uint64_t nbytes;

    if (copy->ndim > WSYNC_COPY_NDIM) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "segments",
                          "copy %zu has %u dimensions, at most %d are possible", index,
                          copy->ndim, WSYNC_COPY_NDIM);
    }
    if (copy->transform > WSYNC_TRANSFORM_F16) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "segments",
                          "copy %zu: there is no transform %u, the last is %d", index,
                          copy->transform, WSYNC_TRANSFORM_F16);
    }
    if (__builtin_mul_overflow(copy->row_count, copy->source_item_nbytes, &nbytes)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "segments",
                          "copy %zu: a row of %llu elements has 2^64 bytes or more", index,
                          (unsigned long long)copy->row_count);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_segments_append(wsync_segments_t *segments, const wsync_copy_t *copies,
                                     size_t count, wsync_segment_list_t *list,
                                     wsync_error_t *err)
{
    const size_t first = segments->count;
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        status = check_copy(&copies[i], i, err);
        if (status == WSYNC_OK) {
            status = append_copy(segments, &copies[i], i, err);
        }
    }
    if (status != WSYNC_OK) {
        segments->count = first;
        if (first > 0) {
            segments->index_count = groups_before(segments->tile_starts[first]) + 1;
            segments->tile_index[segments->index_count - 1] = (uint32_t)first - 1;
        }
        return status;
    }
    *list = (wsync_segment_list_t){.first = (uint32_t)first,
                                   .count = (uint32_t)(segments->count - first)};
    if (list->count > 0) {
        list->tile_count =
            segments->tile_starts[segments->count] - segments->tile_starts[first];
    }
    return WSYNC_OK;
}

uint32_t wsync_segments_grid(const wsync_segment_list_t *list, uint32_t multiprocessors)
{
    const uint64_t wanted =
        wsync_ceil_divide(list->tile_count, WSYNC_KERNEL_BLOCK / WSYNC_KERNEL_WARP);
    const uint64_t resident = (uint64_t)multiprocessors * WSYNC_KERNEL_BLOCKS_PER_SM;

    return (uint32_t)(wanted < resident ? wanted : resident);
}
