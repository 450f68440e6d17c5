/* SPDX-License-Identifier: Apache-2.0
 * Copy lists on the host: how a list is cut into parts, and the loops over outer
 * dimensions.
 */
#include "device/host_copy.h"

#include <stdbool.h>

#include "core/base/divide.h"
#include "device/host_copy_rows.h"

enum {
    /* Work of a row beyond its bytes, at most: the loop and the call. */
    ROW_WORK = 16,
    /* Copies are cut no finer than this. */
    SLICE_WORK = 128 * 1024,
    ROW_CHUNK_NBYTES = 64 * 1024,
    /* Lists that write more than this do not fit the caches of one core: stream. */
    STREAMING_LIST_WORK = 2 * 1024 * 1024,
};

/* A copy as equal units: either index tuples of its first `depth` dimensions, or chunks of
 * `chunk_count` elements of its rows (then depth == ndim). */
typedef struct division {
    unsigned depth;
    uint64_t row_chunks;
    uint64_t chunk_count;
    uint64_t units;
    uint64_t unit_work;
} division_t;

static uint64_t row_nbytes(const wsync_copy_t *copy)
{
    return copy->row_count * copy->destination_item_nbytes;
}

static division_t divide(const wsync_copy_t *copy)
{
    division_t division = {.row_chunks = 1, .chunk_count = copy->row_count, .units = 1};
    const uint64_t nbytes = row_nbytes(copy);
    uint64_t work = nbytes + (2 * nbytes < ROW_WORK ? 2 * nbytes : ROW_WORK);

    for (unsigned d = 0; d < copy->ndim; d++) {
        work *= (uint64_t)copy->extent[d];
    }
    while (division.depth < copy->ndim && work > SLICE_WORK) {
        const uint64_t extent = (uint64_t)copy->extent[division.depth];

        work /= extent;
        division.units *= extent;
        division.depth++;
    }
    if (work > SLICE_WORK) {
        division.chunk_count = ROW_CHUNK_NBYTES / copy->destination_item_nbytes;
        division.row_chunks =
            (copy->row_count + division.chunk_count - 1) / division.chunk_count;
        division.units *= division.row_chunks;
        work = ROW_CHUNK_NBYTES;
    }
    division.unit_work = work;
    if (work == 0) { /* an empty extent */
        division.units = 0;
    }
    return division;
}

/* One copy while it runs; extents and row_count may be a part of the copy's own. */
typedef struct job {
    const wsync_copy_t *copy;
    unsigned char *destination;
    const unsigned char *source;
    uint64_t row_count;
    int64_t extent[WSYNC_COPY_NDIM];
    bool streaming;
} job_t;

static void run_row(const job_t *job, int64_t source, int64_t destination)
{
    const wsync_copy_t *copy = job->copy;

    if (copy->affine.scale != 0) {
        const wsync_host_tile_t row = {
            .inner_count = job->row_count,
            .outer_count = 1,
            .inner_source_stride = copy->source_item_nbytes,
            .inner_destination_stride = copy->destination_item_nbytes,
            .transform = (wsync_transform_t)copy->transform,
            .affine = copy->affine};

        wsync_host_tile_copy(job->destination + destination, job->source + source, &row,
                             copy->source_item_nbytes);
    } else if (copy->transform == WSYNC_TRANSFORM_NONE) {
        wsync_host_row_copy(job->destination + destination, job->source + source,
                            job->row_count * copy->source_item_nbytes, job->streaming);
    } else {
        wsync_host_row_cast(job->destination + destination, job->source + source,
                            job->row_count, (wsync_transform_t)copy->transform,
                            job->streaming);
    }
}

static int64_t magnitude(int64_t value)
{
    return value < 0 ? -value : value;
}

/* The dimension with the smallest step on one side, except `taken`; -1 if there is none. */
static int closest(const job_t *job, const int64_t *stride, int taken)
{
    int best = -1;

    for (int d = 0; d < (int)job->copy->ndim; d++) {
        if (d != taken && job->extent[d] > 1 &&
            (best < 0 || magnitude(stride[d]) < magnitude(stride[best]))) {
            best = d;
        }
    }
    return best;
}

/* Steps the odometer over all dimensions but `skip_a` and `skip_b`; false at its end. */
static bool step(const job_t *job, int64_t index[WSYNC_COPY_NDIM], int skip_a, int skip_b,
                 int64_t *source, int64_t *destination)
{
    const wsync_copy_t *copy = job->copy;

    for (int d = (int)copy->ndim - 1; d >= 0; d--) {
        if (d == skip_a || d == skip_b) {
            continue;
        }
        *source += copy->source_stride[d];
        *destination += copy->destination_stride[d];
        index[d]++;
        if (index[d] < job->extent[d]) {
            return true;
        }
        *source -= copy->source_stride[d] * index[d];
        *destination -= copy->destination_stride[d] * index[d];
        index[d] = 0;
    }
    return false;
}

/* Rows of one element, or of so few bytes that they move like one. */
static void run_elements(const job_t *job, uint64_t item_nbytes)
{
    const wsync_copy_t *copy = job->copy;
    int64_t index[WSYNC_COPY_NDIM] = {0};
    int64_t source = 0;
    int64_t destination = 0;
    const int inner = closest(job, copy->destination_stride, -1);
    const int outer = closest(job, copy->source_stride, inner);
    wsync_host_tile_t tile = {.inner_count = 1,
                              .outer_count = 1,
                              .transform = (wsync_transform_t)copy->transform,
                              .affine = copy->affine};

    if (inner >= 0) {
        tile.inner_count = (uint64_t)job->extent[inner];
        tile.inner_source_stride = copy->source_stride[inner];
        tile.inner_destination_stride = copy->destination_stride[inner];
    }
    if (outer >= 0) {
        tile.outer_count = (uint64_t)job->extent[outer];
        tile.outer_source_stride = copy->source_stride[outer];
        tile.outer_destination_stride = copy->destination_stride[outer];
    }
    do {
        wsync_host_tile_copy(job->destination + destination, job->source + source, &tile,
                             item_nbytes);
    } while (step(job, index, inner, outer, &source, &destination));
}

static void run_job(const job_t *job)
{
    const wsync_copy_t *copy = job->copy;
    int64_t index[WSYNC_COPY_NDIM] = {0};
    int64_t source = 0;
    int64_t destination = 0;

    if (copy->ndim > 0) {
        const uint64_t nbytes = job->row_count * copy->source_item_nbytes;

        if (copy->transform == WSYNC_TRANSFORM_NONE ? wsync_host_tile_fits(nbytes)
                                                    : job->row_count == 1) {
            run_elements(job, nbytes);
            return;
        }
    }
    do {
        run_row(job, source, destination);
    } while (step(job, index, -1, -1, &source, &destination));
}

/* Runs a job whose first dimensions are fixed at the index tuple number `linear`. */
static void run_at(job_t job, unsigned depth, uint64_t linear)
{
    const wsync_copy_t *copy = job.copy;

    for (unsigned d = depth; d-- > 0;) {
        const uint64_t extent = (uint64_t)copy->extent[d];
        const int64_t index = (int64_t)(linear % extent);

        linear /= extent;
        job.source += index * copy->source_stride[d];
        job.destination += index * copy->destination_stride[d];
        job.extent[d] = 1;
    }
    run_job(&job);
}

/* Units [first, last) that are chunks of rows. */
static void run_chunks(const job_t *whole, const division_t *division, uint64_t first,
                       uint64_t last)
{
    const wsync_copy_t *copy = whole->copy;

    while (first < last) {
        const uint64_t chunk = first % division->row_chunks;
        const uint64_t left = division->row_chunks - chunk;
        const uint64_t taken = left < last - first ? left : last - first;
        const uint64_t start = chunk * division->chunk_count;
        const uint64_t count = taken * division->chunk_count;
        job_t job = *whole;

        job.row_count = copy->row_count - start < count ? copy->row_count - start : count;
        job.source += start * copy->source_item_nbytes;
        job.destination += start * copy->destination_item_nbytes;
        run_at(job, division->depth, first / division->row_chunks);
        first += taken;
    }
}

/* Units [first, last) that are index tuples: as few boxes as cover them. */
static void run_units(const job_t *whole, const division_t *division, uint64_t first,
                      uint64_t last)
{
    const wsync_copy_t *copy = whole->copy;
    const unsigned split = division->depth - 1; /* the dimension that is cut */
    uint64_t extent;

    if (division->depth == 0) {
        run_job(whole);
        return;
    }
    extent = (uint64_t)copy->extent[split];
    while (first < last) {
        const uint64_t start = first % extent;
        const uint64_t left = extent - start;
        const uint64_t taken = left < last - first ? left : last - first;
        job_t job = *whole;

        job.source += (int64_t)start * copy->source_stride[split];
        job.destination += (int64_t)start * copy->destination_stride[split];
        job.extent[split] = (int64_t)taken;
        run_at(job, split, first / extent);
        first += taken;
    }
}

/* Units of a copy whose work begins at `start` that begin in [begin, end). */
static void run_part(const wsync_host_list_t *list, const wsync_copy_t *copy,
                     const division_t *division, uint64_t start, uint64_t begin,
                     uint64_t end)
{
    const uint64_t first =
        begin > start ? wsync_ceil_divide(begin - start, division->unit_work) : 0;
    uint64_t last = wsync_ceil_divide(end - start, division->unit_work);
    const unsigned char *source = list->sources[copy->source_buffer].data;
    unsigned char *destination = list->destinations[copy->destination_buffer].data;
    job_t job = {
        .copy = copy,
        .row_count = copy->row_count,
        .streaming = list->work > STREAMING_LIST_WORK,
    };

    last = last < division->units ? last : division->units;
    if (first >= last) {
        return;
    }
    job.source = source + copy->source_offset;
    job.destination = destination + copy->destination_offset;
    for (unsigned d = 0; d < copy->ndim; d++) {
        job.extent[d] = copy->extent[d];
    }
    if (division->row_chunks > 1) {
        run_chunks(&job, division, first, last);
    } else {
        run_units(&job, division, first, last);
    }
}

wsync_host_list_t wsync_host_list(const wsync_copy_t *copies, size_t count,
                                  const wsync_span_t *sources,
                                  const wsync_span_t *destinations)
{
    wsync_host_list_t list = {copies, sources, destinations, count, 0};

    for (size_t i = 0; i < count; i++) {
        const division_t division = divide(&copies[i]);

        list.work += division.units * division.unit_work;
    }
    return list;
}

void wsync_host_list_run(const wsync_host_list_t *list, uint64_t begin, uint64_t end,
                         wsync_host_cursor_t *cursor)
{
    while (cursor->index < list->count && cursor->start < end) {
        const wsync_copy_t *copy = &list->copies[cursor->index];
        const division_t division = divide(copy);
        const uint64_t stop = cursor->start + division.units * division.unit_work;

        if (stop > begin && division.units > 0) {
            run_part(list, copy, &division, cursor->start, begin, end);
        }
        if (stop > end) {
            break; /* the next part begins in this copy */
        }
        cursor->index++;
        cursor->start = stop;
    }
    wsync_host_row_fence();
}

void wsync_host_copy_run(const wsync_copy_t *copies, size_t count,
                         const wsync_span_t *sources, const wsync_span_t *destinations)
{
    const wsync_host_list_t list = wsync_host_list(copies, count, sources, destinations);
    wsync_host_cursor_t cursor = {0};

    wsync_host_list_run(&list, 0, list.work, &cursor);
}
