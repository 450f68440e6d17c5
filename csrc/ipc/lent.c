/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/lent.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/base/counting_sort.h"
#include "device/sealed_blob.h"

static void close_coming(wsync_lent_t *lent)
{
    for (size_t i = 0; i < lent->coming.count; i++) {
        (void)close(lent->coming.items[i]);
    }
    lent->coming.count = 0;
}

void wsync_lent_fini(wsync_lent_t *lent)
{
    for (size_t i = 0; i < lent->segments.count; i++) {
        wsync_memory_destroy(lent->segments.items[i]);
    }
    free((void *)lent->segments.items);
    free(lent->numbers.items);
    close_coming(lent);
    free(lent->coming.items);
    free(lent->spans);
    *lent = (wsync_lent_t){0};
}

static wsync_status_t map(wsync_lent_t *lent, const wsync_device_t *device,
                          wsync_error_t *err)
{
    wsync_memory_t *memory = NULL;
    wsync_status_t status;

    if (!WSYNC_ARRAY_RESERVE(lent->segments, 1) || !WSYNC_ARRAY_RESERVE(lent->numbers, 1)) {
        return wsync_no_memory(err, "session");
    }
    status =
        wsync_memory_borrow(device, lent->coming.items, lent->coming.count, &memory, err);
    if (status == WSYNC_OK) {
        lent->segments.items[lent->segments.count++] = memory;
        lent->numbers.items[lent->numbers.count++] = lent->next++;
    }
    return status;
}

wsync_status_t wsync_lent_add(wsync_lent_t *lent, const wsync_device_t *device,
                              wsync_frame_t *frame, wsync_error_t *err)
{
    const uint64_t number = frame->arguments[0];
    const uint64_t left = frame->arguments[1];
    const size_t more = lent->coming.count + frame->fd_count;
    wsync_status_t status = WSYNC_OK;

    if (number != lent->next || lent->segments.count >= WSYNC_LENT_MAX_SEGMENTS) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "session",
                          "the trainer lends segment %" PRIu64 ", but the next is %" PRIu64
                          ", and %zu of at most %d are lent",
                          number, lent->next, lent->segments.count,
                          WSYNC_LENT_MAX_SEGMENTS);
    }
    if (more > WSYNC_LENT_MAX_SEGMENTS || left > WSYNC_LENT_MAX_SEGMENTS - more) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "session",
                          "segment %" PRIu64 " has %zu descriptors, and %" PRIu64
                          " are to follow: at most %d are possible",
                          number, more, left, WSYNC_LENT_MAX_SEGMENTS);
    }
    if (!WSYNC_ARRAY_RESERVE(lent->coming, frame->fd_count)) {
        return wsync_no_memory(err, "session");
    }
    for (uint32_t i = 0; i < frame->fd_count; i++) {
        lent->coming.items[lent->coming.count++] = frame->fds[i];
        frame->fds[i] = -1;
    }
    if (left == 0) {
        status = map(lent, device, err);
        close_coming(lent);
    }
    return status;
}

static int compare_numbers(const void *left, const void *right)
{
    const uint64_t *a = left;
    const uint64_t *b = right;

    return WSYNC_COMPARE(*a, *b);
}

/* Index of a segment, or SIZE_MAX. */
static size_t find_segment(const wsync_lent_t *lent, uint64_t number)
{
    const uint64_t *numbers = lent->numbers.items;
    const uint64_t *found = lent->numbers.count > 0
                                ? bsearch(&number, numbers, lent->numbers.count,
                                          sizeof(number), compare_numbers)
                                : NULL;

    return found != NULL ? (size_t)(found - numbers) : SIZE_MAX;
}

/* Writes the span of every binding and notes which segments they use. */
static wsync_status_t resolve(const wsync_lent_t *lent, const wsync_binding_t *bindings,
                              size_t count, wsync_span_t *spans, bool *used,
                              wsync_error_t *err)
{
    for (size_t i = 0; i < count; i++) {
        const wsync_binding_t *binding = &bindings[i];
        const size_t index = find_segment(lent, binding->segment);
        const wsync_memory_t *memory;

        if (binding->segment == WSYNC_UNBOUND) {
            continue;
        }
        memory = index != SIZE_MAX ? lent->segments.items[index] : NULL;
        if (memory == NULL || binding->offset > memory->nbytes ||
            binding->nbytes > memory->nbytes - binding->offset) {
            return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "session",
                              "buffer %zu: %" PRIu64 " bytes at %" PRIu64
                              " of segment %" PRIu64 ", which has %" PRIu64,
                              i, binding->nbytes, binding->offset, binding->segment,
                              memory != NULL ? memory->nbytes : 0);
        }
        spans[i] = (wsync_span_t){.data = (unsigned char *)memory->data + binding->offset,
                                  .nbytes = binding->nbytes};
        used[index] = true;
    }
    return WSYNC_OK;
}

static void drop_unused(wsync_lent_t *lent, const bool *used)
{
    size_t kept = 0;

    for (size_t i = 0; i < lent->segments.count; i++) {
        if (used[i]) {
            lent->segments.items[kept] = lent->segments.items[i];
            lent->numbers.items[kept++] = lent->numbers.items[i];
        } else {
            wsync_memory_destroy(lent->segments.items[i]);
        }
    }
    lent->segments.count = kept;
    lent->numbers.count = kept;
}

wsync_status_t wsync_lent_bind(wsync_lent_t *lent, int fd, uint64_t nbytes,
                               wsync_error_t *err)
{
    const size_t count = (size_t)(nbytes / sizeof(wsync_binding_t));
    uint8_t *data = NULL;
    wsync_span_t *spans = NULL;
    bool *used = NULL;
    wsync_status_t status = wsync_blob_read(fd, nbytes, &data, err);

    if (status != WSYNC_OK) {
        return status;
    }
    spans = calloc(count + 1, sizeof(*spans));
    used = calloc(lent->segments.count + 1, sizeof(*used));
    if (spans == NULL || used == NULL) {
        status = wsync_no_memory(err, "session");
        goto cleanup;
    }
    if (nbytes % sizeof(wsync_binding_t) != 0) {
        status =
            wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "session",
                       "bindings have %" PRIu64 " bytes, which is not a multiple of %zu",
                       nbytes, sizeof(wsync_binding_t));
        goto cleanup;
    }
    status = resolve(lent, (const void *)data, count, spans, used, err);
    if (status == WSYNC_OK) {
        drop_unused(lent, used);
        free(lent->spans);
        lent->spans = spans;
        lent->span_count = count;
        lent->generation++;
        spans = NULL;
    }

cleanup:
    free(data);
    free(spans);
    free(used);
    return status;
}

void wsync_lent_unbind(wsync_lent_t *lent)
{
    free(lent->spans);
    lent->spans = NULL;
    lent->span_count = 0;
    lent->generation++;
}

wsync_status_t wsync_lent_release(wsync_lent_t *lent, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    wsync_lent_unbind(lent);
    for (size_t i = 0; i < lent->segments.count; i++) {
        wsync_error_t other = {0};
        const wsync_status_t parked =
            wsync_memory_park(lent->segments.items[i], status == WSYNC_OK ? err : &other);

        status = status == WSYNC_OK ? parked : status;
        wsync_memory_destroy(lent->segments.items[i]);
    }
    lent->segments.count = 0;
    lent->numbers.count = 0;
    return status;
}

wsync_status_t wsync_lent_check(const wsync_lent_t *lent, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < lent->segments.count && status == WSYNC_OK; i++) {
        status = wsync_memory_check_lent(lent->segments.items[i], err);
    }
    return status;
}
