/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_tables.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/checksum.h"
#include "core/base/divide.h"

enum {
    SLAB_NBYTES = 2 * 1024 * 1024,
    TABLE_ALIGNMENT = 256, /* also what cuMemAlloc gives at least */
};

void wsync_cuda_tables_clear(wsync_cuda_tables_t *tables)
{
    for (size_t i = 0; i < WSYNC_CUDA_TABLE_BUCKETS; i++) {
        while (tables->buckets[i] != NULL) {
            wsync_cuda_table_t *table = tables->buckets[i];

            tables->buckets[i] = table->next;
            free(table->key);
            free(table);
        }
    }
    while (tables->slabs != NULL) {
        wsync_cuda_slab_t *slab = tables->slabs;

        tables->slabs = slab->next;
        (void)tables->device->driver->mem_free(slab->at);
        free(slab);
    }
    tables->nbytes = 0;
    memset(tables->lists, 0, sizeof(tables->lists));
}

/* Room in device memory; it goes with the next clear. */
static wsync_status_t reserve(wsync_cuda_tables_t *tables, uint64_t nbytes,
                              wsync_cu_ptr_t *at, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = tables->device->driver;
    const uint64_t wanted = wsync_round_up(nbytes, TABLE_ALIGNMENT);
    wsync_cuda_slab_t *slab = tables->slabs;

    if (slab == NULL || slab->nbytes - slab->used < wanted) {
        wsync_cuda_slab_t *made = calloc(1, sizeof(*made));
        wsync_cu_result_t code;

        if (made == NULL) {
            return wsync_no_memory(err, "calloc");
        }
        made->nbytes = wanted > SLAB_NBYTES ? wanted : SLAB_NBYTES;
        code = driver->mem_alloc(&made->at, (size_t)made->nbytes);
        if (code != WSYNC_CU_SUCCESS) {
            free(made);
            return wsync_cuda_check(driver, code, "cuMemAlloc", err,
                                    "%" PRIu64 " bytes for tables of copies", wanted);
        }
        made->next = slab;
        slab = made;
        tables->slabs = made;
        tables->nbytes += made->nbytes;
    }
    *at = slab->at + slab->used;
    slab->used += wanted;
    return WSYNC_OK;
}

/* Uploads on a stream of its own: the one that runs the copies may be waiting. */
static wsync_status_t upload(const wsync_cuda_tables_t *tables, wsync_cu_ptr_t at,
                             const void *data, size_t nbytes, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = tables->device->driver;
    const char *call = "cuMemcpyHtoDAsync";
    wsync_cu_result_t code = driver->memcpy_in_async(at, data, nbytes, tables->uploads);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuStreamSynchronize";
        code = driver->stream_synchronize(tables->uploads);
        if (code != WSYNC_CU_SUCCESS) {
            /* An error that does not stay must not leave the device reading. */
            (void)driver->stream_synchronize(tables->uploads);
        }
    }
    return wsync_cuda_check(driver, code, call, err, "uploading a table of %zu bytes",
                            nbytes);
}

/* The table that was made of these bytes, or NULL. */
static const wsync_cuda_table_t *find_table(const wsync_cuda_tables_t *tables,
                                            const void *key, size_t nbytes, uint64_t hash)
{
    const wsync_cuda_table_t *table = tables->buckets[hash % WSYNC_CUDA_TABLE_BUCKETS];

    while (table != NULL && (table->hash != hash || table->key_nbytes != nbytes ||
                             memcmp(table->key, key, nbytes) != 0)) {
        table = table->next;
    }
    return table;
}

/* A table that is not in the list yet. */
static wsync_status_t make_table(const void *key, size_t nbytes, uint64_t hash,
                                 wsync_cuda_table_t **table, wsync_error_t *err)
{
    wsync_cuda_table_t *made = calloc(1, sizeof(*made));
    void *own_key = malloc(nbytes);

    if (made == NULL || own_key == NULL) {
        free(made);
        free(own_key);
        return wsync_no_memory(err, "malloc");
    }
    memcpy(own_key, key, nbytes);
    made->key = own_key;
    made->key_nbytes = nbytes;
    made->hash = hash;
    *table = made;
    return WSYNC_OK;
}

/* The table of these bytes, or, if there is none, one that is to be filled. */
static wsync_status_t find_or_make(const wsync_cuda_tables_t *tables, const void *key,
                                   size_t nbytes, const wsync_cuda_table_t **table,
                                   wsync_cuda_table_t **made, wsync_error_t *err)
{
    const uint64_t hash = wsync_checksum(key, nbytes);

    *table = find_table(tables, key, nbytes, hash);
    return *table != NULL ? WSYNC_OK : make_table(key, nbytes, hash, made, err);
}

/* Moves the table into the list if it was filled, else frees it and returns NULL. */
static const wsync_cuda_table_t *settle(wsync_cuda_tables_t *tables,
                                        wsync_cuda_table_t *table, wsync_status_t status)
{
    wsync_cuda_table_t **bucket = &tables->buckets[table->hash % WSYNC_CUDA_TABLE_BUCKETS];

    tables->uploaded++;
    if (status == WSYNC_OK) {
        table->next = *bucket;
        *bucket = table;
        return table;
    }
    free(table->key);
    free(table);
    return NULL;
}

/* Its three parts at once, as they lie in device memory: each upload keeps the host. */
static wsync_status_t upload_segments(const wsync_cuda_tables_t *tables,
                                      const wsync_segments_t *segments,
                                      const wsync_cuda_table_t *table, wsync_error_t *err)
{
    const size_t index_nbytes = segments->index_count * sizeof(*segments->tile_index);
    const size_t nbytes = (size_t)table->index_offset + index_nbytes;
    unsigned char *all = malloc(nbytes);
    wsync_status_t status;

    if (all == NULL) {
        return wsync_no_memory(err, "malloc");
    }
    memcpy(all, segments->items, (size_t)table->starts_offset);
    memcpy(all + table->starts_offset, segments->tile_starts,
           (size_t)(table->index_offset - table->starts_offset));
    memcpy(all + table->index_offset, segments->tile_index, index_nbytes);
    status = upload(tables, table->at, all, nbytes, err);
    free(all);
    return status;
}

static wsync_status_t fill_segments(wsync_cuda_tables_t *tables, const wsync_copy_t *copies,
                                    size_t count, wsync_cuda_table_t *table,
                                    wsync_error_t *err)
{
    wsync_segments_t segments = {0};
    wsync_status_t status =
        wsync_segments_append(&segments, copies, count, &table->list, err);

    if (status == WSYNC_OK && table->list.count > 0) {
        table->starts_offset = segments.count * sizeof(*segments.items);
        table->index_offset =
            table->starts_offset + (segments.count + 1) * sizeof(*segments.tile_starts);
        status = reserve(
            tables,
            table->index_offset + segments.index_count * sizeof(*segments.tile_index),
            &table->at, err);
        if (status == WSYNC_OK) {
            status = upload_segments(tables, &segments, table, err);
        }
    }
    wsync_segments_fini(&segments);
    return status;
}

static wsync_status_t fill_pieces(wsync_cuda_tables_t *tables,
                                  const wsync_quantise_piece_t *pieces, size_t count,
                                  wsync_cuda_table_t *table, wsync_error_t *err)
{
    wsync_quantise_tasks_t tasks;
    wsync_status_t status = wsync_quantise_tasks_init(&tasks, pieces, count, err);

    if (status != WSYNC_OK) {
        return status;
    }
    table->lists = tasks.lists;
    if (tasks.count > 0) {
        const size_t items_nbytes = tasks.count * sizeof(*tasks.items);
        const size_t starts_nbytes = (tasks.count + 1) * sizeof(*tasks.thread_starts);

        table->starts_offset = items_nbytes;
        table->scratch_offset = (items_nbytes + starts_nbytes + 7) / 8 * 8;
        status = reserve(tables,
                         table->scratch_offset + tasks.lists.scratch_count * sizeof(float),
                         &table->at, err);
        if (status == WSYNC_OK) {
            status = upload(tables, table->at, tasks.items, items_nbytes, err);
        }
        if (status == WSYNC_OK) {
            status = upload(tables, table->at + items_nbytes, tasks.thread_starts,
                            starts_nbytes, err);
        }
    }
    wsync_quantise_tasks_fini(&tasks);
    return status;
}

wsync_status_t wsync_cuda_tables_segments(wsync_cuda_tables_t *tables, uint64_t id,
                                          const wsync_copy_t *copies, size_t count,
                                          const wsync_cuda_table_t **table,
                                          wsync_error_t *err)
{
    wsync_cuda_list_t *list =
        &tables->lists[(uintptr_t)copies / sizeof(*copies) % WSYNC_CUDA_TABLE_BUCKETS];
    wsync_cuda_table_t *made = NULL;
    wsync_status_t status;

    if (id != 0 && list->id == id && list->copies == copies && list->count == count) {
        *table = list->table;
        return WSYNC_OK;
    }
    status = find_or_make(tables, copies, count * sizeof(*copies), table, &made, err);
    if (made != NULL) {
        status = fill_segments(tables, copies, count, made, err);
        *table = settle(tables, made, status);
    }
    if (status == WSYNC_OK) {
        *list = (wsync_cuda_list_t){id, copies, count, *table};
    }
    return status;
}

wsync_status_t wsync_cuda_tables_pieces(wsync_cuda_tables_t *tables,
                                        const wsync_quantise_piece_t *pieces, size_t count,
                                        const wsync_cuda_table_t **table,
                                        wsync_error_t *err)
{
    wsync_cuda_table_t *made = NULL;
    wsync_status_t status =
        find_or_make(tables, pieces, count * sizeof(*pieces), table, &made, err);

    if (made != NULL) {
        status = fill_pieces(tables, pieces, count, made, err);
        *table = settle(tables, made, status);
    }
    return status;
}

wsync_status_t wsync_cuda_tables_addresses(wsync_cuda_tables_t *tables,
                                           const wsync_cuda_place_t *places, size_t count,
                                           const wsync_cuda_table_t **table,
                                           wsync_error_t *err)
{
    const size_t nbytes = count * sizeof(uint64_t);
    uint64_t *addresses = malloc(nbytes);
    wsync_cuda_table_t *made = NULL;
    wsync_status_t status;

    if (addresses == NULL) {
        return wsync_no_memory(err, "malloc");
    }
    for (size_t i = 0; i < count; i++) {
        addresses[i] = places[i].at;
    }
    status = find_or_make(tables, addresses, nbytes, table, &made, err);
    if (made != NULL) {
        status = reserve(tables, nbytes, &made->at, err);
        if (status == WSYNC_OK) {
            status = upload(tables, made->at, addresses, nbytes, err);
        }
        *table = settle(tables, made, status);
    }
    free(addresses);
    return status;
}
