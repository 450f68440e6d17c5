/* SPDX-License-Identifier: Apache-2.0 */
#include "core/write_overlap.h"
#include "core/base/counting_sort.h"

#include <stdlib.h>

/* The bytes between a copy's first and last destination byte. */
typedef struct reach {
    uint32_t buffer;
    uint64_t low;
    uint64_t high;
    size_t copy;
} reach_t;

/* Copies whose reaches touch one another, on a grid of granules that all of their rows,
 * offsets and strides are multiples of. */
typedef struct cluster {
    const wsync_copy_t *copies;
    const reach_t *reaches;
    size_t count;
    uint64_t low;
    uint64_t granule; /* bytes */
    uint64_t *bits;   /* granules that are written */
    size_t word_count;
} cluster_t;

static uint64_t row_nbytes(const wsync_copy_t *copy)
{
    return copy->row_count * copy->destination_item_nbytes;
}

static reach_t reach_of(const wsync_copy_t *copy, size_t index)
{
    reach_t reach = {copy->destination_buffer, copy->destination_offset,
                     copy->destination_offset + row_nbytes(copy), index};

    for (unsigned i = 0; i < copy->ndim; i++) {
        const int64_t step = (copy->extent[i] - 1) * copy->destination_stride[i];

        if (step < 0) {
            reach.low += (uint64_t)step;
        } else {
            reach.high += (uint64_t)step;
        }
    }
    return reach;
}

static int compare_reaches(const void *left, const void *right)
{
    const reach_t *a = left;
    const reach_t *b = right;
    int order = WSYNC_COMPARE(a->buffer, b->buffer);

    order = order != 0 ? order : WSYNC_COMPARE(a->low, b->low);
    return order != 0 ? order : WSYNC_COMPARE(a->copy, b->copy);
}

/* Every dimension steps over all that lies inside it: no byte can be met twice. */
static bool is_nested(const wsync_copy_t *copy)
{
    uint64_t inner = row_nbytes(copy);

    for (unsigned i = copy->ndim; i-- > 0;) {
        const int64_t stride = copy->destination_stride[i];

        if (stride < 0 || (uint64_t)stride < inner) {
            return false;
        }
        inner += (uint64_t)(copy->extent[i] - 1) * (uint64_t)stride;
    }
    return true;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b != 0) {
        const uint64_t rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

/* Marks the granules of one row; returns the first that was marked before, or
 * UINT64_MAX. */
static uint64_t mark_row(cluster_t *cluster, uint64_t first, uint64_t count)
{
    for (uint64_t at = first; at < first + count; at++) {
        const uint64_t bit = UINT64_C(1) << (at % 64);
        uint64_t *word = &cluster->bits[at / 64];

        if ((*word & bit) != 0) {
            return at;
        }
        *word |= bit;
    }
    return UINT64_MAX;
}

/* Marks what a copy writes; returns the first granule that was marked before. */
static uint64_t mark_copy(cluster_t *cluster, const wsync_copy_t *copy)
{
    const uint64_t row = row_nbytes(copy) / cluster->granule;
    int64_t step[WSYNC_COPY_NDIM] = {0};

    for (;;) {
        uint64_t offset = copy->destination_offset - cluster->low;
        uint64_t hit;
        unsigned dim = copy->ndim;

        for (unsigned i = 0; i < copy->ndim; i++) {
            offset += (uint64_t)(step[i] * copy->destination_stride[i]);
        }
        hit = mark_row(cluster, offset / cluster->granule, row);
        if (hit != UINT64_MAX) {
            return hit;
        }
        while (dim > 0 && ++step[dim - 1] == copy->extent[dim - 1]) {
            step[--dim] = 0;
        }
        if (dim == 0) {
            return UINT64_MAX;
        }
    }
}

static const wsync_copy_t *copy_at(const cluster_t *cluster, size_t index)
{
    return &cluster->copies[cluster->reaches[index].copy];
}

/* A granule was written twice, the second time by the cluster's copy `second`: the other is
 * the first one that writes it too. */
static void report(cluster_t *cluster, size_t second, uint64_t granule,
                   wsync_overlap_t *overlap)
{
    overlap->found = true;
    overlap->first = cluster->reaches[second].copy;
    overlap->second = cluster->reaches[second].copy;
    overlap->buffer = cluster->reaches[second].buffer;
    overlap->offset = cluster->low + granule * cluster->granule;
    for (size_t i = 0; i < cluster->word_count; i++) {
        cluster->bits[i] = 0;
    }
    for (size_t i = 0; i < second; i++) {
        (void)mark_copy(cluster, copy_at(cluster, i));
        if ((cluster->bits[granule / 64] >> (granule % 64) & 1) != 0) {
            overlap->first = cluster->reaches[i].copy;
            break;
        }
    }
}

static wsync_status_t check_cluster(cluster_t *cluster, uint64_t high,
                                    wsync_overlap_t *overlap, wsync_error_t *err)
{
    cluster->granule = 0;
    for (size_t i = 0; i < cluster->count; i++) {
        const wsync_copy_t *copy = copy_at(cluster, i);

        cluster->granule = common_divisor(row_nbytes(copy), cluster->granule);
        cluster->granule =
            common_divisor(copy->destination_offset - cluster->low, cluster->granule);
        for (unsigned j = 0; j < copy->ndim; j++) {
            const int64_t stride = copy->destination_stride[j];

            cluster->granule = common_divisor(
                stride < 0 ? -(uint64_t)stride : (uint64_t)stride, cluster->granule);
        }
    }
    cluster->word_count = (size_t)((high - cluster->low) / cluster->granule / 64 + 1);
    cluster->bits = calloc(cluster->word_count, sizeof(*cluster->bits));
    if (cluster->bits == NULL) {
        return wsync_no_memory(err, "overlap");
    }
    for (size_t i = 0; i < cluster->count && !overlap->found; i++) {
        const uint64_t granule = mark_copy(cluster, copy_at(cluster, i));

        if (granule != UINT64_MAX) {
            report(cluster, i, granule, overlap);
        }
    }
    free(cluster->bits);
    return WSYNC_OK;
}

wsync_status_t wsync_copies_find_overlap(const wsync_copy_t *copies, size_t count,
                                         wsync_overlap_t *overlap, wsync_error_t *err)
{
    wsync_overlap_t result = {0};
    reach_t *reaches = malloc((count + 1) * sizeof(*reaches));
    wsync_status_t status = WSYNC_OK;

    if (reaches == NULL) {
        return wsync_no_memory(err, "overlap");
    }
    for (size_t i = 0; i < count; i++) {
        reaches[i] = reach_of(&copies[i], i);
    }
    qsort(reaches, count, sizeof(*reaches), compare_reaches);
    for (size_t i = 0; i < count && status == WSYNC_OK && !result.found;) {
        cluster_t cluster = {
            .copies = copies, .reaches = &reaches[i], .count = 1, .low = reaches[i].low};
        uint64_t high = reaches[i].high;

        while (i + cluster.count < count &&
               reaches[i + cluster.count].buffer == reaches[i].buffer &&
               reaches[i + cluster.count].low < high) {
            const uint64_t end = reaches[i + cluster.count].high;

            high = end > high ? end : high;
            cluster.count++;
        }
        if (cluster.count > 1 || !is_nested(copy_at(&cluster, 0))) {
            status = check_cluster(&cluster, high, &result, err);
        }
        i += cluster.count;
    }
    free(reaches);
    if (status == WSYNC_OK) {
        *overlap = result;
    }
    return status;
}

/* Copies to the shards of a tensor, by address, from a buffer of its number. */
static wsync_status_t append_shards(const wsync_layout_t *layout, size_t tensor,
                                    const wsync_span_t *spans, wsync_copies_t *copies,
                                    wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;
    size_t count;
    const wsync_shard_t *shards = wsync_layout_shards(layout, tensor, &count);

    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        const wsync_shard_t *shard = &shards[i];
        wsync_place_t place = wsync_layout_place(layout, shard, &shard->box);
        wsync_place_t source;

        place.buffer = 0;
        place.offset += (uintptr_t)spans[shard->buffer].data;
        source = place;
        source.buffer = (uint32_t)tensor;
        status = wsync_copies_append(copies, shard->box.extent, &source, &place, err);
    }
    return status;
}

static const char *name_of(const wsync_layout_t *layout, const wsync_copy_t *copy)
{
    return wsync_layout_tensor(layout, copy->source_buffer)->name;
}

static wsync_status_t check_shards(const wsync_layout_t *layout, const wsync_span_t *spans,
                                   wsync_error_t *err)
{
    wsync_copies_t copies = {0};
    wsync_overlap_t overlap = {0};
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < wsync_layout_tensor_count(layout) && status == WSYNC_OK; i++) {
        status = append_shards(layout, i, spans, &copies, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_copies_find_overlap(copies.items, copies.count, &overlap, err);
    }
    if (status == WSYNC_OK && overlap.found) {
        status = wsync_fail(
            err, WSYNC_ERR_LAYOUT, 0, "overlap",
            "%.256s and %.256s are kept in the same memory: both write the byte at 0x%llx",
            name_of(layout, &copies.items[overlap.first]),
            name_of(layout, &copies.items[overlap.second]),
            (unsigned long long)overlap.offset);
    }
    wsync_copies_fini(&copies);
    return status;
}

static int compare_spans(const void *left, const void *right)
{
    const wsync_span_t *a = left;
    const wsync_span_t *b = right;

    return WSYNC_COMPARE((uintptr_t)a->data, (uintptr_t)b->data);
}

/* Whether spans share memory, which hardly any do: then two that are neighbours when they
 * are sorted do. */
static wsync_status_t find_shared(const wsync_span_t *spans, size_t count, bool *shared,
                                  wsync_error_t *err)
{
    wsync_span_t *sorted = malloc((count + 1) * sizeof(*sorted));

    if (sorted == NULL) {
        return wsync_no_memory(err, "overlap");
    }
    for (size_t i = 0; i < count; i++) {
        sorted[i] = spans[i];
    }
    qsort(sorted, count, sizeof(*sorted), compare_spans);
    *shared = false;
    for (size_t i = 1; i < count && !*shared; i++) {
        *shared = (uintptr_t)sorted[i].data - (uintptr_t)sorted[i - 1].data <
                  sorted[i - 1].nbytes;
    }
    free(sorted);
    return WSYNC_OK;
}

wsync_status_t wsync_layout_check_apart(const wsync_layout_t *layout,
                                        const wsync_span_t *spans, size_t span_count,
                                        wsync_error_t *err)
{
    bool shared = false;
    wsync_status_t status;

    for (uint32_t rank = 0; rank < wsync_layout_rank_count(layout); rank++) {
        const uint32_t count = wsync_layout_buffer_count(layout, rank);

        if (count > span_count) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "overlap",
                              "%zu spans for %u buffers", span_count, count);
        }
    }
    status = find_shared(spans, span_count, &shared, err);
    return status == WSYNC_OK && shared ? check_shards(layout, spans, err) : status;
}
