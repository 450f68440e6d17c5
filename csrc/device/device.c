/* SPDX-License-Identifier: Apache-2.0
 * What all backends have in common: counted memory, the checks of arguments, and events. An
 * event is a 64-bit word in shared memory, with a futex on its low half. */
#include "device/device.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/quantise/piece_check.h"
#include "device/deadline.h"

enum {
    /* The futex compares 32 bits.  A value that grew by exactly 2^32 between the load and
     * the sleep looks unchanged; so no sleep is longer than this. */
    SLEEP_NS = 50 * 1000 * 1000,
    /* Where nobody is woken: at first at once and then at this pace. */
    POLL_MIN_NS = 2 * 1000,
    POLL_MAX_NS = 100 * 1000,
};

const char *wsync_device_text(const wsync_device_t *device,
                              char text[WSYNC_DEVICE_TEXT_NBYTES])
{
    (void)snprintf(text, WSYNC_DEVICE_TEXT_NBYTES,
                   device->ordinal < 0 ? "the host" : "GPU %d", device->ordinal);
    return text;
}

/* --- memory --- */

void wsync_memory_init(wsync_memory_t *memory, const wsync_device_t *device,
                       uint64_t nbytes)
{
    *memory = (wsync_memory_t){.device = device, .nbytes = nbytes, .fd = -1};
    atomic_init(&memory->references, 1);
    atomic_init(&memory->pins, 0);
}

wsync_status_t wsync_memory_create(const wsync_device_t *self, uint64_t nbytes,
                                   wsync_memory_t **memory, wsync_error_t *err)
{
    return self->memory_ops->make(self, false, -1, nbytes, memory, err);
}

static wsync_status_t import(const wsync_device_t *self, bool control, int fd,
                             uint64_t nbytes, wsync_memory_t **memory, wsync_error_t *err)
{
    return fd >= 0 ? self->memory_ops->make(self, control, fd, nbytes, memory, err)
                   : wsync_fail(err, WSYNC_ERR_OS, EBADF, "fcntl",
                                "descriptor %d: fcntl: %s", fd, strerror(EBADF));
}

wsync_status_t wsync_memory_import(const wsync_device_t *self, int fd, uint64_t nbytes,
                                   wsync_memory_t **memory, wsync_error_t *err)
{
    return import(self, false, fd, nbytes, memory, err);
}

wsync_status_t wsync_control_create(const wsync_device_t *self, uint64_t nbytes,
                                    wsync_memory_t **memory, wsync_error_t *err)
{
    return self->memory_ops->make(self, true, -1, nbytes, memory, err);
}

wsync_status_t wsync_control_import(const wsync_device_t *self, int fd, uint64_t nbytes,
                                    wsync_memory_t **memory, wsync_error_t *err)
{
    return import(self, true, fd, nbytes, memory, err);
}

wsync_status_t wsync_memory_borrow(const wsync_device_t *self, const int *fds, size_t count,
                                   wsync_memory_t **memory, wsync_error_t *err)
{
    return self->memory_ops->borrow(self, fds, count, memory, err);
}

wsync_status_t wsync_memory_check_lent(const wsync_memory_t *memory, wsync_error_t *err)
{
    const wsync_memory_ops_t *ops = memory->device->memory_ops;

    return ops->check_lent != NULL ? ops->check_lent(memory, err) : WSYNC_OK;
}

wsync_status_t wsync_memory_keep_more(wsync_memory_t *memory, const int *fds, size_t count,
                                      wsync_error_t *err)
{
    memory->more = calloc(count, sizeof(*memory->more));
    if (memory->more == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    for (size_t i = 1; i < count; i++) {
        const int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);

        if (fd < 0) {
            return wsync_fail(err, WSYNC_ERR_OS, errno, "fcntl", "descriptor %d: fcntl: %s",
                              fds[i], strerror(errno));
        }
        memory->more[memory->more_count++] = fd;
    }
    return WSYNC_OK;
}

void wsync_memory_close_more(wsync_memory_t *memory)
{
    for (size_t i = 0; i < memory->more_count; i++) {
        (void)close(memory->more[i]);
    }
    free(memory->more);
    memory->more = NULL;
    memory->more_count = 0;
}

void wsync_memory_retain(wsync_memory_t *memory)
{
    (void)atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
}

void wsync_memory_destroy(wsync_memory_t *memory)
{
    /* Acquire and release: what other threads did with the mapping comes before its end. */
    if (memory != NULL &&
        atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) == 1) {
        memory->device->memory_ops->destroy(memory);
    }
}

wsync_status_t wsync_memory_pin(wsync_memory_t *memory, wsync_error_t *err)
{
    return wsync_pins_add(&memory->pins, err);
}

void wsync_memory_unpin(wsync_memory_t *memory)
{
    wsync_pins_drop(&memory->pins);
}

wsync_status_t wsync_memory_park(wsync_memory_t *memory, wsync_error_t *err)
{
    return memory->device->memory_ops->park(memory, err);
}

wsync_status_t wsync_memory_unpark(wsync_memory_t *memory, int fd, wsync_error_t *err)
{
    const wsync_status_t status = wsync_pins_check_parked(&memory->pins, err);

    return status == WSYNC_OK ? memory->device->memory_ops->unpark(memory, fd, err)
                              : status;
}

/* --- streams --- */

wsync_status_t wsync_stream_create(const wsync_device_t *self, unsigned threads,
                                   wsync_stream_t **stream, wsync_error_t *err)
{
    if (threads < 1 || threads > WSYNC_STREAM_MAX_THREADS) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_stream_create",
                          "a stream of %u threads: 1 to %d are possible", threads,
                          (int)WSYNC_STREAM_MAX_THREADS);
    }
    return self->stream_ops->create(self, threads, stream, err);
}

bool wsync_stream_destroy(wsync_stream_t *stream)
{
    return stream == NULL || stream->device->stream_ops->destroy(stream);
}

wsync_status_t wsync_stream_check(const wsync_stream_t *stream,
                                  const wsync_device_t *device, const char *what,
                                  wsync_error_t *err)
{
    char text[2][WSYNC_DEVICE_TEXT_NBYTES];

    return stream->device == device
               ? WSYNC_OK
               : wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_stream",
                            "%s is on %s, but the stream is on %s", what,
                            wsync_device_text(device, text[0]),
                            wsync_device_text(stream->device, text[1]));
}

wsync_status_t wsync_stream_copy(wsync_stream_t *stream, const wsync_batch_t *batch,
                                 wsync_error_t *err)
{
    const wsync_status_t status =
        wsync_copies_check(batch->copies, batch->count, batch->sources, batch->source_count,
                           batch->destinations, batch->destination_count, err);

    return status == WSYNC_OK ? stream->device->stream_ops->copy(stream, batch, err)
                              : status;
}

wsync_status_t wsync_stream_copy_list(wsync_stream_t *stream, const wsync_copy_t *copies,
                                      size_t count, const wsync_span_t *sources,
                                      size_t source_count, const wsync_span_t *destinations,
                                      size_t destination_count, wsync_error_t *err)
{
    return wsync_stream_copy(stream,
                             &(wsync_batch_t){.copies = copies,
                                              .count = count,
                                              .sources = sources,
                                              .source_count = source_count,
                                              .destinations = destinations,
                                              .destination_count = destination_count},
                             err);
}

wsync_status_t wsync_stream_quantise(wsync_stream_t *stream,
                                     const wsync_quantise_batch_t *batch,
                                     wsync_error_t *err)
{
    const wsync_status_t status =
        wsync_quantise_check(batch->pieces, batch->count, batch->sources,
                             batch->source_count, &batch->image, &batch->amaxes, err);

    return status == WSYNC_OK ? stream->device->stream_ops->quantise(stream, batch, err)
                              : status;
}

static wsync_status_t enqueue(wsync_stream_t *stream, bool waits, wsync_event_t event,
                              uint64_t value, wsync_error_t *err)
{
    wsync_status_t status =
        wsync_stream_check(stream, event.memory->device, "the event", err);

    if (status == WSYNC_OK) {
        status = wsync_event_check(event, err);
    }
    return status == WSYNC_OK
               ? stream->device->stream_ops->enqueue(stream, waits, event, value, err)
               : status;
}

wsync_status_t wsync_stream_record(wsync_stream_t *stream, wsync_event_t event,
                                   uint64_t value, wsync_error_t *err)
{
    return enqueue(stream, false, event, value, err);
}

wsync_status_t wsync_stream_wait(wsync_stream_t *stream, wsync_event_t event,
                                 uint64_t value, wsync_error_t *err)
{
    return enqueue(stream, true, event, value, err);
}

wsync_status_t wsync_device_settle(const wsync_device_t *self, wsync_error_t *err)
{
    const wsync_stream_ops_t *ops = self->stream_ops;

    return ops->settle != NULL ? ops->settle(self, err) : WSYNC_OK;
}

void *wsync_stream_handle(wsync_stream_t *stream)
{
    const wsync_stream_ops_t *ops = stream->device->stream_ops;

    return ops->handle != NULL ? ops->handle(stream) : NULL;
}

unsigned wsync_stream_ahead(wsync_stream_t *stream)
{
    const wsync_stream_ops_t *ops = stream->device->stream_ops;

    return ops->ahead != NULL ? ops->ahead(stream) : WSYNC_STREAM_AHEAD;
}

bool wsync_stream_abandon(wsync_stream_t *stream, int timeout_ms)
{
    return stream->device->stream_ops->abandon(stream, timeout_ms);
}

wsync_status_t wsync_stream_synchronize(wsync_stream_t *stream, int timeout_ms,
                                        wsync_error_t *err)
{
    return stream->device->stream_ops->synchronize(stream, timeout_ms, err);
}

void wsync_stream_trace(wsync_stream_t *stream, wsync_stream_span_t *next, size_t capacity,
                        wsync_stream_span_t **spans, size_t *count)
{
    stream->device->stream_ops->trace(stream, next, capacity, spans, count);
}

/* --- events --- */

static uint64_t *event_word(wsync_event_t event)
{
    return (uint64_t *)(void *)(event.memory->words + event.offset);
}

static uint32_t *low_half(uint64_t *word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return (uint32_t *)(void *)word + 1;
#else
    return (uint32_t *)(void *)word;
#endif
}

wsync_status_t wsync_event_check(wsync_event_t event, wsync_error_t *err)
{
    const uint64_t nbytes = event.memory->nbytes;

    if (event.memory->words == NULL) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_event",
                          "event at offset %" PRIu64
                          " of GPU memory: events are words of control memory",
                          event.offset);
    }
    if (event.offset % sizeof(uint64_t) != 0 || nbytes < sizeof(uint64_t) ||
        event.offset > nbytes - sizeof(uint64_t)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_event",
                          "event at offset %" PRIu64
                          " is not an aligned 64-bit word of a memory of %" PRIu64 " bytes",
                          event.offset, nbytes);
    }
    return WSYNC_OK;
}

void wsync_event_set(wsync_event_t event, uint64_t value)
{
    uint64_t *word = event_word(event);
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);

    while (seen < value) {
        if (__atomic_compare_exchange_n(word, &seen, value, false, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED)) {
            (void)syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
            return;
        }
    }
}

uint64_t wsync_event_query(wsync_event_t event)
{
    return __atomic_load_n(event_word(event), __ATOMIC_ACQUIRE);
}

wsync_status_t wsync_event_wait(wsync_event_t event, uint64_t value, int timeout_ms,
                                wsync_error_t *err)
{
    const uint64_t deadline = wsync_deadline_ns(timeout_ms);
    const wsync_status_t status = wsync_event_check(event, err);
    struct timespec pause = {.tv_nsec = POLL_MIN_NS};

    if (status != WSYNC_OK) {
        return status;
    }
    for (;;) {
        const uint64_t seen = wsync_event_query(event);
        const uint64_t now = wsync_clock_ns();

        if (seen >= value) {
            return WSYNC_OK;
        }
        if (now >= deadline) {
            /* No time in the text: callers wait in slices. */
            return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "wsync_event_wait",
                              "event at offset %" PRIu64 " is %" PRIu64
                              "; the wait was for %" PRIu64,
                              event.offset, seen, value);
        }
        if (!event.memory->device->wakes) {
            (void)nanosleep(&pause, NULL);
            pause.tv_nsec *= pause.tv_nsec < POLL_MAX_NS ? 2 : 1;
            continue;
        }
        pause.tv_nsec = (long)(deadline - now < SLEEP_NS ? deadline - now : SLEEP_NS);
        if (syscall(SYS_futex, low_half(event_word(event)), FUTEX_WAIT, (uint32_t)seen,
                    &pause, NULL, 0) != 0 &&
            errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT) {
            return wsync_fail(err, WSYNC_ERR_OS, errno, "futex",
                              "event at offset %" PRIu64 ": futex: %s", event.offset,
                              strerror(errno));
        }
    }
}
