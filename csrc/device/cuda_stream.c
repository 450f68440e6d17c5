/* SPDX-License-Identifier: Apache-2.0
 * Streams of the driver.  Sources of copies may be any memory: what the device does
 * not reach is gathered by threads of the host.  Host memory is taken for what it was
 * (pinned or not) until the stream is seen idle: synchronise or abandon before it becomes
 * other memory.
 *
 * What is enqueued is given to the device at once, so nothing of it
 * can be dropped: a stream is abandoned by giving up its waits and letting it run dry. */
#include "device/cuda.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/base/array.h"
#include "device/cuda_quantise.h"
#include "device/deadline.h"

enum {
    POLL_MIN_NS = 5 * 1000,
    POLL_MAX_NS = 200 * 1000,
    /* A device that takes longer to run dry has hung: its memory is left alone. */
    DRAIN_MS = 60 * 1000,
    /* How long the times of batches are waited for, which nobody needs. */
    TRACE_MS = 1000,
    /* How often a stream that is never waited for is looked at to let go of memory. */
    LOOK_INTERVAL = 64,
};

/* Something enqueued that the device may not have passed. */
typedef struct entry {
    wsync_event_t event; /* memory NULL: copies; else it is retained */
    uint64_t value;
    bool waits;
} entry_t;

/* A batch that is timed: the driver's events before and behind it. */
typedef struct timed {
    wsync_cu_event_t begin;
    wsync_cu_event_t end;
} timed_t;

/* `order` is held while something is enqueued, and taken before `mutex`, which guards the
 * entries alone: a driver call may block until the device goes on, and the one who gives up
 * its waits must get through. */
typedef struct cuda_stream {
    wsync_stream_t base;
    const wsync_cuda_device_t *device;
    wsync_cuda_runner_t runner;
    pthread_mutex_t order;
    pthread_mutex_t mutex;
    entry_t *entries; /* since the stream was seen idle */
    size_t count;
    size_t capacity;
    atomic_bool lost; /* it was given up, and the device did not run dry */

    wsync_stream_span_t *trace; /* owned; NULL: batches are not timed */
    timed_t *timed;             /* owned, trace_capacity of them */
    size_t trace_capacity;
    size_t timed_count;
} cuda_stream_t;

static cuda_stream_t *cuda_stream_of(wsync_stream_t *stream)
{
    return (cuda_stream_t *)(void *)stream;
}

static void forget_entries(cuda_stream_t *self)
{
    for (size_t i = 0; i < self->count; i++) {
        wsync_memory_destroy(self->entries[i].event.memory);
    }
    self->count = 0;
}

/* Whether the device has passed all that was enqueued; in the context.  Entries are
 * forgotten if it has, or if it has failed for good: then it runs nothing any more. */
static wsync_cu_result_t look(cuda_stream_t *self)
{
    const wsync_cuda_driver_t *driver = self->device->driver;
    wsync_cu_result_t code;

    (void)pthread_mutex_lock(&self->mutex);
    code = driver->stream_query(self->runner.stream);
    if (code != WSYNC_CU_SUCCESS && code != WSYNC_CU_NOT_READY) {
        code = driver->stream_query(self->runner.stream); /* an error that stays */
    }
    if (code != WSYNC_CU_NOT_READY) {
        if (code != WSYNC_CU_SUCCESS) {
            wsync_cuda_runner_abandon(&self->runner);
        }
        wsync_cuda_runner_settle(&self->runner);
        forget_entries(self);
    }
    (void)pthread_mutex_unlock(&self->mutex);
    return code;
}

/* Sets the words that the stream still waits for.  Others that wait for the same word see
 * it come, too: they are closed with the stream. */
static void give_up_waits(cuda_stream_t *self)
{
    (void)pthread_mutex_lock(&self->mutex);
    for (size_t i = 0; i < self->count; i++) {
        if (self->entries[i].waits) {
            wsync_event_set(self->entries[i].event, self->entries[i].value);
        }
    }
    (void)pthread_mutex_unlock(&self->mutex);
}

/* In the context. */
static void free_timed(cuda_stream_t *self)
{
    for (size_t i = 0; i < self->timed_count; i++) {
        (void)self->device->driver->event_destroy(self->timed[i].begin);
        (void)self->device->driver->event_destroy(self->timed[i].end);
    }
    free(self->timed);
    self->timed = NULL;
    self->timed_count = 0;
}

/* Gives everything back; the device uses none of it any more.  In the context. */
static void free_stream(cuda_stream_t *self)
{
    free_timed(self);
    wsync_cuda_runner_fini(&self->runner);
    (void)pthread_mutex_destroy(&self->mutex);
    (void)pthread_mutex_destroy(&self->order);
    free(self->trace);
    free(self->entries);
    free(self);
}

/* Until the device has passed everything, or the deadline (NOT_READY); in the context. */
static wsync_cu_result_t drain(cuda_stream_t *self, int timeout_ms, bool gives_up)
{
    const uint64_t deadline = wsync_deadline_ns(timeout_ms);
    struct timespec pause = {.tv_nsec = POLL_MIN_NS};

    for (;;) {
        wsync_cu_result_t code;

        if (gives_up) {
            give_up_waits(self);
        }
        code = look(self);
        if (code != WSYNC_CU_NOT_READY || wsync_clock_ns() >= deadline) {
            return code;
        }
        (void)nanosleep(&pause, NULL);
        pause.tv_nsec *= pause.tv_nsec < POLL_MAX_NS ? 2 : 1;
    }
}

static wsync_status_t check_call(const cuda_stream_t *self, wsync_cu_result_t code,
                                 const char *call, wsync_error_t *err)
{
    return wsync_cuda_check(self->device->driver, code, call, err, "a stream of %s",
                            self->device->label);
}

static wsync_status_t stream_create(const wsync_device_t *device, unsigned threads,
                                    wsync_stream_t **stream, wsync_error_t *err)
{
    cuda_stream_t *made = calloc(1, sizeof(*made));
    wsync_status_t status;

    if (made == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    made->base.device = device;
    made->device = wsync_cuda_of(device);
    status = wsync_cuda_enter(made->device, err);
    if (status != WSYNC_OK) {
        free(made);
        return status;
    }
    (void)pthread_mutex_init(&made->order, NULL);
    (void)pthread_mutex_init(&made->mutex, NULL);
    status = wsync_cuda_runner_init(&made->runner, made->device, threads, err);
    if (status != WSYNC_OK) {
        free_stream(made);
    } else {
        *stream = &made->base;
    }
    wsync_cuda_leave(wsync_cuda_of(device));
    return status;
}

static bool stream_destroy(wsync_stream_t *stream)
{
    cuda_stream_t *self = cuda_stream_of(stream);
    const wsync_cuda_device_t *device = self->device;
    bool dry;

    if (!wsync_cuda_enter_to_free(device)) {
        return true; /* nothing runs without the context, nor in a fork */
    }
    /* What a hung device may still write to is never given back. */
    dry = drain(self, atomic_load(&self->lost) ? 0 : DRAIN_MS, true) != WSYNC_CU_NOT_READY;
    if (dry) {
        free_stream(self);
    }
    wsync_cuda_leave(device);
    return dry;
}

/* Whether the device has run dry; in the context. */
static bool abandon(cuda_stream_t *self, int timeout_ms)
{
    bool dry;

    wsync_cuda_runner_abandon(&self->runner);
    dry = drain(self, timeout_ms, true) != WSYNC_CU_NOT_READY;
    atomic_store(&self->lost, !dry);
    return dry;
}

static unsigned stream_ahead(wsync_stream_t *stream)
{
    const cuda_stream_t *self = cuda_stream_of(stream);

    return atomic_load(&self->runner.steady) ? WSYNC_STREAM_AHEAD : 0;
}

static void *stream_handle(wsync_stream_t *stream)
{
    return cuda_stream_of(stream)->runner.stream;
}

static bool stream_abandon(wsync_stream_t *stream, int timeout_ms)
{
    cuda_stream_t *self = cuda_stream_of(stream);
    bool dry = true;

    if (wsync_cuda_enter_to_free(self->device)) {
        dry = abandon(self, timeout_ms);
        wsync_cuda_leave(self->device);
    }
    return dry;
}

static wsync_status_t stream_synchronize(wsync_stream_t *stream, int timeout_ms,
                                         wsync_error_t *err)
{
    cuda_stream_t *self = cuda_stream_of(stream);
    wsync_status_t status = wsync_cuda_enter(self->device, err);
    wsync_cu_result_t code;
    size_t count;

    if (status != WSYNC_OK) {
        return status;
    }
    code = drain(self, timeout_ms, false);
    wsync_cuda_leave(self->device);
    if (code != WSYNC_CU_NOT_READY) {
        return check_call(self, code, "cuStreamQuery", err);
    }
    (void)pthread_mutex_lock(&self->mutex);
    count = self->count;
    (void)pthread_mutex_unlock(&self->mutex);
    /* No time in the text: callers wait in slices. */
    return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "wsync_stream_synchronize",
                      "%zu entries of the stream are not done", count);
}

/* Room for one more entry, before anything is enqueued; in the context. */
static wsync_status_t reserve_entry(cuda_stream_t *self, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;
    entry_t *entries;
    bool due;

    (void)pthread_mutex_lock(&self->mutex);
    due = self->count > 0 && self->count % LOOK_INTERVAL == 0;
    (void)pthread_mutex_unlock(&self->mutex);
    if (due) {
        (void)look(self);
    }
    (void)pthread_mutex_lock(&self->mutex);
    entries = wsync_array_reserve(self->entries, &self->capacity, self->count + 1,
                                  sizeof(*entries));
    if (entries != NULL) {
        self->entries = entries;
    } else {
        status = wsync_no_memory(err, "realloc");
    }
    (void)pthread_mutex_unlock(&self->mutex);
    return status;
}

static void add_entry(cuda_stream_t *self, const entry_t *entry)
{
    if (entry->event.memory != NULL) {
        wsync_memory_retain(entry->event.memory);
    }
    (void)pthread_mutex_lock(&self->mutex);
    self->entries[self->count++] = *entry;
    (void)pthread_mutex_unlock(&self->mutex);
}

/* In the context, in order. */
static wsync_status_t enqueue_word(cuda_stream_t *self, const entry_t *entry,
                                   wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = self->device->driver;
    const wsync_cu_stream_t stream = self->runner.stream;
    const wsync_cu_ptr_t at = wsync_cuda_event_address(entry->event);
    wsync_status_t status = reserve_entry(self, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (entry->waits) {
        status = check_call(
            self, driver->stream_wait_value(stream, at, entry->value, WSYNC_CU_WAIT_GEQ),
            "cuStreamWaitValue64", err);
    } else {
        status = check_call(self, driver->stream_write_value(stream, at, entry->value, 0),
                            "cuStreamWriteValue64", err);
    }
    if (status == WSYNC_OK) {
        add_entry(self, entry);
    }
    return status;
}

static wsync_status_t stream_enqueue(wsync_stream_t *stream, bool waits,
                                     wsync_event_t event, uint64_t value,
                                     wsync_error_t *err)
{
    const entry_t entry = {.event = event, .value = value, .waits = waits};
    cuda_stream_t *self = cuda_stream_of(stream);
    _Atomic uint64_t *recorded = wsync_cuda_event_recorded(event);
    wsync_status_t status;

    status = wsync_cuda_enter(self->device, err);
    if (status != WSYNC_OK) {
        return status;
    }
    (void)pthread_mutex_lock(&self->order);
    /* The device stores what it is given; so that words only grow, no less is given. */
    if ((waits ? wsync_event_query(event) : atomic_load(recorded)) < value) {
        status = enqueue_word(self, &entry, err);
        if (status == WSYNC_OK && !waits) {
            atomic_store(recorded, value);
        }
    }
    (void)pthread_mutex_unlock(&self->order);
    wsync_cuda_leave(self->device);
    return status;
}

static wsync_status_t settle(const wsync_device_t *base, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(base);
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status == WSYNC_OK) {
        status =
            wsync_cuda_check(device->driver, device->driver->context_synchronize(),
                             "cuCtxSynchronize", err, "what runs on %s", device->label);
        wsync_cuda_leave(device);
    }
    return status;
}

/* Puts an event of the driver into the stream, for timing; NULL if that fails. */
static wsync_cu_event_t mark(const cuda_stream_t *self, wsync_cu_stream_t stream)
{
    const wsync_cuda_driver_t *driver = self->device->driver;
    wsync_cu_event_t event = NULL;

    if (driver->event_create(&event, 0) != WSYNC_CU_SUCCESS) {
        return NULL;
    }
    if (driver->event_record(event, stream) != WSYNC_CU_SUCCESS) {
        (void)driver->event_destroy(event);
        return NULL;
    }
    return event;
}

/* Copies, or else pieces.  In the context, in order. */
static wsync_status_t run_batch(cuda_stream_t *self, const wsync_batch_t *copies,
                                const wsync_quantise_batch_t *pieces, wsync_error_t *err)
{
    const bool timed = copies != NULL && self->timed_count < self->trace_capacity;
    bool begun = false;
    timed_t pair = {0};
    wsync_status_t status;

    if (wsync_cuda_runner_full(&self->runner) && look(self) == WSYNC_CU_SUCCESS) {
        wsync_cuda_runner_trim(&self->runner);
    }
    if (timed) {
        pair.begin = mark(self, self->runner.stream);
    }
    status = copies != NULL ? wsync_cuda_runner_run(&self->runner, copies, &begun, err)
                            : wsync_cuda_quantise(&self->runner, pieces, &begun, err);
    if (pair.begin != NULL && status == WSYNC_OK) {
        pair.end = mark(self, self->runner.stream);
    }
    if (pair.end != NULL) {
        self->timed[self->timed_count++] = pair;
    } else if (pair.begin != NULL) {
        (void)self->device->driver->event_destroy(pair.begin);
    }
    if (status == WSYNC_OK) {
        add_entry(self, &(entry_t){0});
    } else if (begun) {
        /* Nothing of a batch that failed runs on, though part of it was enqueued. */
        (void)abandon(self, DRAIN_MS);
    }
    return status;
}

/* Copies, or else pieces. */
static wsync_status_t enqueue_batch(cuda_stream_t *self, const wsync_batch_t *copies,
                                    const wsync_quantise_batch_t *pieces,
                                    wsync_error_t *err)
{
    wsync_status_t status = wsync_cuda_enter(self->device, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (copies == NULL || copies->count > 0) {
        (void)pthread_mutex_lock(&self->order);
        status = reserve_entry(self, err);
        if (status == WSYNC_OK) {
            status = run_batch(self, copies, pieces, err);
        }
        (void)pthread_mutex_unlock(&self->order);
    }
    wsync_cuda_leave(self->device);
    return status;
}

static wsync_status_t stream_copy(wsync_stream_t *stream, const wsync_batch_t *batch,
                                  wsync_error_t *err)
{
    return enqueue_batch(cuda_stream_of(stream), batch, NULL, err);
}

static wsync_status_t stream_quantise(wsync_stream_t *stream,
                                      const wsync_quantise_batch_t *batch,
                                      wsync_error_t *err)
{
    return enqueue_batch(cuda_stream_of(stream), NULL, batch, err);
}

/* Writes when the timed batches ran, counted back from `now`; in the context.  Those that
 * are not over are left out. */
static size_t read_timed(const cuda_stream_t *self, wsync_cu_event_t now, uint64_t now_ns)
{
    const wsync_cuda_driver_t *driver = self->device->driver;
    size_t count = 0;

    for (size_t i = 0; i < self->timed_count; i++) {
        const timed_t *pair = &self->timed[i];
        float begin_ms = 0;
        float end_ms = 0;

        if (driver->event_query(pair->end) == WSYNC_CU_SUCCESS &&
            driver->event_elapsed(&begin_ms, pair->begin, now) == WSYNC_CU_SUCCESS &&
            driver->event_elapsed(&end_ms, pair->end, now) == WSYNC_CU_SUCCESS) {
            self->trace[count++] = (wsync_stream_span_t){
                now_ns - (uint64_t)(begin_ms > 0 ? (double)begin_ms * 1e6 : 0),
                now_ns - (uint64_t)(end_ms > 0 ? (double)end_ms * 1e6 : 0)};
        }
    }
    return count;
}

/* Whether the device comes to an event in time; in the context. */
static bool await(const cuda_stream_t *self, wsync_cu_event_t event, int timeout_ms)
{
    const uint64_t deadline = wsync_deadline_ns(timeout_ms);
    const struct timespec pause = {.tv_nsec = POLL_MIN_NS};

    for (;;) {
        const wsync_cu_result_t code = self->device->driver->event_query(event);

        if (code != WSYNC_CU_NOT_READY || wsync_clock_ns() >= deadline) {
            return code == WSYNC_CU_SUCCESS;
        }
        (void)nanosleep(&pause, NULL);
    }
}

/* The device and the host read their clocks at about one time. */
static size_t read_trace(cuda_stream_t *self)
{
    const wsync_cuda_driver_t *driver = self->device->driver;
    wsync_cu_event_t now = NULL;
    size_t count = 0;

    if (self->timed_count > 0) {
        now = mark(self, self->runner.uploads);
    }
    if (now != NULL) {
        if (await(self, now, TRACE_MS)) {
            count = read_timed(self, now, wsync_clock_ns());
        }
        (void)driver->event_destroy(now);
    }
    free_timed(self);
    return count;
}

static void stream_trace(wsync_stream_t *stream, wsync_stream_span_t *next, size_t capacity,
                         wsync_stream_span_t **spans, size_t *count)
{
    cuda_stream_t *self = cuda_stream_of(stream);

    *spans = NULL;
    *count = 0;
    if (wsync_cuda_enter(self->device, NULL) != WSYNC_OK) {
        free(next);
        return;
    }
    (void)pthread_mutex_lock(&self->order);
    *count = read_trace(self);
    *spans = self->trace;
    self->trace = next;
    self->timed = next != NULL ? calloc(capacity, sizeof(*self->timed)) : NULL;
    self->trace_capacity = self->timed != NULL ? capacity : 0;
    (void)pthread_mutex_unlock(&self->order);
    wsync_cuda_leave(self->device);
}

const wsync_stream_ops_t wsync_cuda_stream_ops = {
    .create = stream_create,
    .destroy = stream_destroy,
    .copy = stream_copy,
    .quantise = stream_quantise,
    .enqueue = stream_enqueue,
    .settle = settle,
    .ahead = stream_ahead,
    .handle = stream_handle,
    .abandon = stream_abandon,
    .synchronize = stream_synchronize,
    .trace = stream_trace,
};
