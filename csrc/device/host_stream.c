/* SPDX-License-Identifier: Apache-2.0
 * Host streams: worker threads that run a queue in order.  A batch of copies, or of what is
 * quantised, is handed out in pieces; the next entry starts when all pieces of the one
 * before are done. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/base/divide.h"
#include "device/deadline.h"
#include "device/host.h"
#include "device/host_copy.h"
#include "device/host_quantise.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum {
    /* Some 50 us of copying: small enough to share a batch evenly, large enough that taking
     * one under the mutex does not show. */
    PIECE_WORK = 1024 * 1024,
    /* The same of quantising, which has nothing fetched when a piece begins. */
    QUANTISE_WORK = 4 * PIECE_WORK,
    /* How soon a stream that waits for an event notices that it is to give up. */
    WAIT_SLICE_MS = 5,
};

typedef enum entry_kind {
    ENTRY_COPY,
    ENTRY_QUANTISE,
    ENTRY_RECORD,
    ENTRY_WAIT,
} entry_kind_t;

typedef struct entry {
    struct entry *next;
    entry_kind_t kind;
    wsync_host_list_t list; /* a batch of copies */
    wsync_host_quantise_t quantise;
    wsync_event_t event; /* of a record or a wait; its memory is retained */
    uint64_t value;
    uint64_t pieces;
    uint64_t taken;    /* pieces handed out */
    uint64_t finished; /* pieces done */
    uint64_t begun_ns; /* of a batch that is noted, else 0 */
} entry_t;

/* All fields but the first block are guarded by mutex.  Workers hold it except while they
 * run a piece; an entry is freed by whoever finishes its last piece. */
typedef struct host_stream {
    wsync_stream_t base;
    unsigned thread_count; /* running threads */
    pid_t pid;             /* threads do not survive a fork */

    pthread_mutex_t mutex;
    pthread_cond_t work; /* a piece can be taken, or stopping */
    pthread_cond_t idle; /* an entry was finished or dropped */
    entry_t *head;
    entry_t *tail;
    uint64_t enqueued;   /* entries */
    uint64_t passed;     /* done or dropped */
    unsigned abandoners; /* calls of abandon under way */
    bool stopping;

    wsync_stream_span_t *trace; /* owned; NULL: batches are not noted */
    size_t trace_capacity;
    size_t trace_count;
    pthread_t threads[];
} host_stream_t;

static host_stream_t *host_stream_of(wsync_stream_t *stream)
{
    return (host_stream_t *)(void *)stream;
}

/* Whether a wait is to give up.  Not for one who holds the mutex. */
static bool gives_up(host_stream_t *self)
{
    bool result;

    (void)pthread_mutex_lock(&self->mutex);
    result = self->stopping || self->abandoners > 0;
    (void)pthread_mutex_unlock(&self->mutex);
    return result;
}

/* False if the entry is a wait that was given up. */
static bool run_piece(host_stream_t *self, const entry_t *entry, uint64_t piece,
                      wsync_host_cursor_t *cursor)
{
    switch (entry->kind) {
    case ENTRY_RECORD:
        wsync_event_set(entry->event, entry->value);
        return true;
    case ENTRY_WAIT:
        while (wsync_event_wait(entry->event, entry->value, WAIT_SLICE_MS, NULL) !=
               WSYNC_OK) {
            if (gives_up(self)) {
                return false;
            }
        }
        return true;
    case ENTRY_COPY:
        wsync_host_list_run(&entry->list, piece * PIECE_WORK, (piece + 1) * PIECE_WORK,
                            cursor);
        return true;
    case ENTRY_QUANTISE:
        wsync_host_quantise_run(&entry->quantise, piece * QUANTISE_WORK,
                                (piece + 1) * QUANTISE_WORK, cursor);
        return true;
    }
    return true;
}

static bool has_event(const entry_t *entry)
{
    return entry->kind == ENTRY_RECORD || entry->kind == ENTRY_WAIT;
}

static void free_entry(entry_t *entry)
{
    if (has_event(entry)) {
        wsync_memory_destroy(entry->event.memory);
    }
    free(entry);
}

/* Takes everything behind the head off the queue, and the head too unless it has begun. */
static void drop_rest(host_stream_t *self)
{
    entry_t *head = self->head;
    entry_t *rest = head;

    if (head != NULL && head->taken > 0) {
        rest = head->next;
        head->next = NULL;
        head->pieces = head->taken; /* no more of it is handed out */
        self->tail = head;
    } else {
        self->head = NULL;
        self->tail = NULL;
    }
    while (rest != NULL) {
        entry_t *next = rest->next;

        free_entry(rest);
        self->passed++;
        rest = next;
    }
    (void)pthread_cond_broadcast(&self->idle);
}

/* Notes when the head ran, if that is wanted. */
static void note_head(host_stream_t *self)
{
    const entry_t *entry = self->head;

    if (entry->begun_ns > 0 && self->trace_count < self->trace_capacity) {
        self->trace[self->trace_count++] =
            (wsync_stream_span_t){entry->begun_ns, wsync_clock_ns()};
    }
}

/* Takes the finished head off the queue. */
static void pass_head(host_stream_t *self)
{
    entry_t *entry = self->head;

    note_head(self);
    self->head = entry->next;
    if (self->head == NULL) {
        self->tail = NULL;
    }
    self->passed++;
    free_entry(entry);
    (void)pthread_cond_broadcast(&self->idle);
    if (self->head != NULL && self->head->pieces > 1) {
        (void)pthread_cond_broadcast(&self->work);
    }
}

/* A thread begins with the floating-point control of the one that makes it, where a program
 * (torch.set_flush_denormal) or a library linked with -ffast-math may have subnormal
 * numbers count as 0.  What is computed here is the same in every process. */
static void round_as_always(void)
{
#if defined(__x86_64__)
    _mm_setcsr(0x1f80); /* to nearest, subnormals as they are, no traps */
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
}

static void *worker_main(void *argument)
{
    host_stream_t *self = argument;
    wsync_host_cursor_t cursor = {0};
    uint64_t place = UINT64_MAX; /* the entry that the cursor belongs to */

    round_as_always();
    (void)pthread_mutex_lock(&self->mutex);
    for (;;) {
        entry_t *entry = self->head;
        uint64_t piece;
        bool kept;

        if (entry == NULL && self->stopping) {
            break;
        }
        if (entry == NULL || entry->taken == entry->pieces) {
            (void)pthread_cond_wait(&self->work, &self->mutex);
            continue;
        }
        if (place != self->passed) {
            place = self->passed;
            cursor = (wsync_host_cursor_t){0};
        }
        if (self->trace != NULL && entry->taken == 0 && entry->kind == ENTRY_COPY) {
            entry->begun_ns = wsync_clock_ns();
        }
        piece = entry->taken++;
        (void)pthread_mutex_unlock(&self->mutex);
        kept = run_piece(self, entry, piece, &cursor);
        (void)pthread_mutex_lock(&self->mutex);
        if (!kept) {
            drop_rest(self);
        }
        entry->finished++;
        if (entry->finished == entry->pieces) {
            pass_head(self);
        }
    }
    /* The others may be asleep with nothing left to wake them. */
    (void)pthread_cond_broadcast(&self->work);
    (void)pthread_mutex_unlock(&self->mutex);
    return NULL;
}

/* Starts one worker with all signals blocked: they are the main thread's business. */
static int start_worker(host_stream_t *self, pthread_t *thread)
{
    sigset_t all;
    sigset_t before;
    int code;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(thread, NULL, worker_main, self);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

/* Without an error check: on Linux these only fill in the structures. */
static void init_sync(host_stream_t *self)
{
    pthread_condattr_t attributes;

    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_mutex_init(&self->mutex, NULL);
    (void)pthread_cond_init(&self->work, NULL);
    (void)pthread_cond_init(&self->idle, &attributes);
    (void)pthread_condattr_destroy(&attributes);
}

static bool stream_destroy(wsync_stream_t *stream)
{
    host_stream_t *self = host_stream_of(stream);

    /* In a fork: the threads are the parent's, and the mutex may be held for ever. */
    if (self->pid != getpid()) {
        return true;
    }
    (void)pthread_mutex_lock(&self->mutex);
    self->stopping = true;
    (void)pthread_cond_broadcast(&self->work);
    (void)pthread_mutex_unlock(&self->mutex);
    for (unsigned i = 0; i < self->thread_count; i++) {
        (void)pthread_join(self->threads[i], NULL);
    }
    (void)pthread_cond_destroy(&self->idle);
    (void)pthread_cond_destroy(&self->work);
    (void)pthread_mutex_destroy(&self->mutex);
    free(self->trace);
    free(self);
    return true;
}

static wsync_status_t stream_create(const wsync_device_t *device, unsigned threads,
                                    wsync_stream_t **stream, wsync_error_t *err)
{
    host_stream_t *made = calloc(1, sizeof(*made) + threads * sizeof(made->threads[0]));

    if (made == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    made->base.device = device;
    made->pid = getpid();
    init_sync(made);
    while (made->thread_count < threads) {
        const int code = start_worker(made, &made->threads[made->thread_count]);

        if (code != 0) {
            const unsigned number = made->thread_count + 1;

            (void)stream_destroy(&made->base);
            return wsync_fail(err, WSYNC_ERR_OS, code, "pthread_create",
                              "pthread_create: thread %u of %u of a stream: %s", number,
                              threads, strerror(code));
        }
        made->thread_count++;
    }
    *stream = &made->base;
    return WSYNC_OK;
}

static wsync_status_t check_process(const host_stream_t *self, wsync_error_t *err)
{
    const pid_t pid = getpid();

    if (self->pid != pid) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_stream",
                          "the stream was made in process %ld and does not run in its fork "
                          "%ld",
                          (long)self->pid, (long)pid);
    }
    return WSYNC_OK;
}

/* Copies `entry` to the end of the queue. */
static wsync_status_t enqueue(host_stream_t *self, const entry_t *entry, wsync_error_t *err)
{
    entry_t *made = malloc(sizeof(*made));

    if (made == NULL) {
        return wsync_no_memory(err, "malloc");
    }
    *made = *entry;
    if (has_event(made)) {
        wsync_memory_retain(made->event.memory);
    }
    (void)pthread_mutex_lock(&self->mutex);
    if (self->tail != NULL) {
        self->tail->next = made;
    } else {
        self->head = made;
    }
    self->tail = made;
    self->enqueued++;
    if (self->head == made) { /* else whoever passes the head goes on with it */
        (void)(made->pieces > 1 ? pthread_cond_broadcast(&self->work)
                                : pthread_cond_signal(&self->work));
    }
    (void)pthread_mutex_unlock(&self->mutex);
    return WSYNC_OK;
}

/* Enqueues what is work for the threads, in pieces of `each`, unless there is none. */
static wsync_status_t enqueue_work(wsync_stream_t *stream, entry_t *entry, uint64_t work,
                                   uint64_t each, wsync_error_t *err)
{
    const wsync_status_t status = check_process(host_stream_of(stream), err);

    entry->pieces = wsync_ceil_divide(work, each);
    return status == WSYNC_OK && work > 0 ? enqueue(host_stream_of(stream), entry, err)
                                          : status;
}

static wsync_status_t stream_copy(wsync_stream_t *stream, const wsync_batch_t *batch,
                                  wsync_error_t *err)
{
    entry_t entry = {.kind = ENTRY_COPY,
                     .list = wsync_host_list(batch->copies, batch->count, batch->sources,
                                             batch->destinations)};

    return enqueue_work(stream, &entry, entry.list.work, PIECE_WORK, err);
}

static wsync_status_t stream_quantise(wsync_stream_t *stream,
                                      const wsync_quantise_batch_t *batch,
                                      wsync_error_t *err)
{
    entry_t entry = {.kind = ENTRY_QUANTISE, .quantise = wsync_host_quantise(batch)};

    return enqueue_work(stream, &entry, entry.quantise.work, QUANTISE_WORK, err);
}

static wsync_status_t stream_enqueue(wsync_stream_t *stream, bool waits,
                                     wsync_event_t event, uint64_t value,
                                     wsync_error_t *err)
{
    const entry_t entry = {.kind = waits ? ENTRY_WAIT : ENTRY_RECORD,
                           .event = event,
                           .value = value,
                           .pieces = 1};
    const wsync_status_t status = check_process(host_stream_of(stream), err);

    return status == WSYNC_OK ? enqueue(host_stream_of(stream), &entry, err) : status;
}

static void stream_trace(wsync_stream_t *stream, wsync_stream_span_t *next, size_t capacity,
                         wsync_stream_span_t **spans, size_t *count)
{
    host_stream_t *self = host_stream_of(stream);

    *spans = NULL;
    *count = 0;
    if (self->pid != getpid()) {
        free(next); /* nothing runs in a fork */
        return;
    }
    (void)pthread_mutex_lock(&self->mutex);
    *spans = self->trace;
    *count = self->trace_count;
    self->trace = next;
    self->trace_capacity = next != NULL ? capacity : 0;
    self->trace_count = 0;
    (void)pthread_mutex_unlock(&self->mutex);
}

static bool stream_abandon(wsync_stream_t *stream, int timeout_ms)
{
    host_stream_t *self = host_stream_of(stream);
    uint64_t target;

    (void)timeout_ms; /* a piece of a copy is all there is to wait for */
    if (self->pid != getpid()) {
        return true; /* nothing runs in a fork */
    }
    (void)pthread_mutex_lock(&self->mutex);
    target = self->enqueued;
    self->abandoners++;
    drop_rest(self);
    while (self->passed < target) {
        (void)pthread_cond_wait(&self->idle, &self->mutex);
    }
    self->abandoners--;
    (void)pthread_mutex_unlock(&self->mutex);
    return true;
}

static wsync_status_t stream_synchronize(wsync_stream_t *stream, int timeout_ms,
                                         wsync_error_t *err)
{
    host_stream_t *self = host_stream_of(stream);
    const uint64_t deadline = wsync_deadline_ns(timeout_ms);
    const struct timespec until = {
        .tv_sec = (time_t)(deadline / 1000000000),
        .tv_nsec = (long)(deadline % 1000000000),
    };
    wsync_status_t status = check_process(self, err);
    uint64_t target;
    int code = 0;

    if (status != WSYNC_OK) {
        return status;
    }
    (void)pthread_mutex_lock(&self->mutex);
    target = self->enqueued;
    while (self->passed < target && code != ETIMEDOUT) {
        code = pthread_cond_timedwait(&self->idle, &self->mutex, &until);
    }
    if (self->passed < target) {
        /* No time in the text: callers wait in slices. */
        status = wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "wsync_stream_synchronize",
                            "%" PRIu64 " entries of the stream are not done",
                            target - self->passed);
    }
    (void)pthread_mutex_unlock(&self->mutex);
    return status;
}

static const wsync_stream_ops_t stream_ops = {
    .create = stream_create,
    .destroy = stream_destroy,
    .copy = stream_copy,
    .quantise = stream_quantise,
    .enqueue = stream_enqueue,
    .abandon = stream_abandon,
    .synchronize = stream_synchronize,
    .trace = stream_trace,
};

const wsync_device_t *wsync_device_host(void)
{
    static const wsync_device_t host = {.memory_ops = &wsync_host_memory_ops,
                                        .stream_ops = &stream_ops,
                                        .name = "host",
                                        .wakes = true,
                                        .ordinal = -1};

    return &host;
}
