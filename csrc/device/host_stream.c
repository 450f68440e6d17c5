/* SPDX-License-Identifier: Apache-2.0
 * Host streams: worker threads that run a queue in order.  A batch of copies is handed out
 * in pieces; the next entry starts when all pieces of the one before are done. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device/host.h"
#include "device/host_copy.h"

enum {
    MAX_THREADS = 64,
    /* Some 50 us of copying: small enough to share a batch evenly, large enough that taking
     * one under the mutex does not show. */
    PIECE_WORK = 1024 * 1024,
    /* How soon a stream that waits for an event notices that it is to give up. */
    WAIT_SLICE_MS = 5,
};

typedef enum entry_kind {
    ENTRY_COPY,
    ENTRY_RECORD,
    ENTRY_WAIT,
} entry_kind_t;

typedef struct entry {
    struct entry *next;
    entry_kind_t kind;
    wsync_host_list_t list; /* a batch of copies */
    wsync_event_t event;    /* of a record or a wait; its memory is retained */
    uint64_t value;
    uint64_t pieces;
    uint64_t taken;    /* pieces handed out */
    uint64_t finished; /* pieces done */
    uint64_t begun_ns; /* of a batch that is noted, else 0 */
} entry_t;

/* All fields but the first block are guarded by mutex.  Workers hold it except while they
 * run a piece; an entry is freed by whoever finishes its last piece. */
struct wsync_stream {
    pthread_t *threads;
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
};

/* Whether a wait is to give up.  Not for one who holds the mutex. */
static bool gives_up(wsync_stream_t *stream)
{
    bool result;

    (void)pthread_mutex_lock(&stream->mutex);
    result = stream->stopping || stream->abandoners > 0;
    (void)pthread_mutex_unlock(&stream->mutex);
    return result;
}

/* False if the entry is a wait that was given up. */
static bool run_piece(wsync_stream_t *stream, const entry_t *entry, uint64_t piece,
                      wsync_host_cursor_t *cursor)
{
    switch (entry->kind) {
    case ENTRY_RECORD:
        wsync_host_event_set(entry->event, entry->value);
        return true;
    case ENTRY_WAIT:
        while (wsync_host_event_wait(entry->event, entry->value, WAIT_SLICE_MS, NULL) !=
               WSYNC_OK) {
            if (gives_up(stream)) {
                return false;
            }
        }
        return true;
    case ENTRY_COPY:
        wsync_host_list_run(&entry->list, piece * PIECE_WORK, (piece + 1) * PIECE_WORK,
                            cursor);
        return true;
    }
    return true;
}

static void free_entry(entry_t *entry)
{
    if (entry->kind != ENTRY_COPY) {
        wsync_host_memory_destroy(entry->event.memory);
    }
    free(entry);
}

/* Takes everything behind the head off the queue, and the head too unless it has begun. */
static void drop_rest(wsync_stream_t *stream)
{
    entry_t *head = stream->head;
    entry_t *rest = head;

    if (head != NULL && head->taken > 0) {
        rest = head->next;
        head->next = NULL;
        head->pieces = head->taken; /* no more of it is handed out */
        stream->tail = head;
    } else {
        stream->head = NULL;
        stream->tail = NULL;
    }
    while (rest != NULL) {
        entry_t *next = rest->next;

        free_entry(rest);
        stream->passed++;
        rest = next;
    }
    (void)pthread_cond_broadcast(&stream->idle);
}

/* Notes when the head ran, if that is wanted. */
static void note_head(wsync_stream_t *stream)
{
    const entry_t *entry = stream->head;

    if (entry->begun_ns > 0 && stream->trace_count < stream->trace_capacity) {
        stream->trace[stream->trace_count++] =
            (wsync_stream_span_t){entry->begun_ns, wsync_host_deadline(0)};
    }
}

/* Takes the finished head off the queue. */
static void pass_head(wsync_stream_t *stream)
{
    entry_t *entry = stream->head;

    note_head(stream);
    stream->head = entry->next;
    if (stream->head == NULL) {
        stream->tail = NULL;
    }
    stream->passed++;
    free_entry(entry);
    (void)pthread_cond_broadcast(&stream->idle);
    if (stream->head != NULL && stream->head->pieces > 1) {
        (void)pthread_cond_broadcast(&stream->work);
    }
}

static void *worker_main(void *argument)
{
    wsync_stream_t *stream = argument;
    wsync_host_cursor_t cursor = {0};
    uint64_t place = UINT64_MAX; /* the entry that the cursor belongs to */

    (void)pthread_mutex_lock(&stream->mutex);
    for (;;) {
        entry_t *entry = stream->head;
        uint64_t piece;
        bool kept;

        if (entry == NULL && stream->stopping) {
            break;
        }
        if (entry == NULL || entry->taken == entry->pieces) {
            (void)pthread_cond_wait(&stream->work, &stream->mutex);
            continue;
        }
        if (place != stream->passed) {
            place = stream->passed;
            cursor = (wsync_host_cursor_t){0};
        }
        if (stream->trace != NULL && entry->taken == 0 && entry->kind == ENTRY_COPY) {
            entry->begun_ns = wsync_host_deadline(0);
        }
        piece = entry->taken++;
        (void)pthread_mutex_unlock(&stream->mutex);
        kept = run_piece(stream, entry, piece, &cursor);
        (void)pthread_mutex_lock(&stream->mutex);
        if (!kept) {
            drop_rest(stream);
        }
        entry->finished++;
        if (entry->finished == entry->pieces) {
            pass_head(stream);
        }
    }
    /* The others may be asleep with nothing left to wake them. */
    (void)pthread_cond_broadcast(&stream->work);
    (void)pthread_mutex_unlock(&stream->mutex);
    return NULL;
}

/* Starts one worker with all signals blocked: they are the main thread's business. */
static int start_worker(wsync_stream_t *stream, pthread_t *thread)
{
    sigset_t all;
    sigset_t before;
    int code;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(thread, NULL, worker_main, stream);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

static int init_sync(wsync_stream_t *stream)
{
    pthread_condattr_t attributes;
    int code = pthread_condattr_init(&attributes);

    if (code != 0) {
        return code;
    }
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    code = pthread_mutex_init(&stream->mutex, NULL);
    if (code != 0) {
        goto cleanup;
    }
    code = pthread_cond_init(&stream->work, NULL);
    if (code != 0) {
        (void)pthread_mutex_destroy(&stream->mutex);
        goto cleanup;
    }
    code = pthread_cond_init(&stream->idle, &attributes);
    if (code != 0) {
        (void)pthread_cond_destroy(&stream->work);
        (void)pthread_mutex_destroy(&stream->mutex);
    }

cleanup:
    (void)pthread_condattr_destroy(&attributes);
    return code;
}

wsync_status_t wsync_host_stream_create(unsigned threads, wsync_stream_t **stream,
                                        wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;
    wsync_stream_t *made = NULL;
    int code;

    if (threads < 1 || threads > MAX_THREADS) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_stream_create",
                          "a stream of %u threads: 1 to %d are possible", threads,
                          (int)MAX_THREADS);
    }
    made = calloc(1, sizeof(*made));
    if (made != NULL) {
        made->threads = calloc(threads, sizeof(*made->threads));
    }
    if (made == NULL || made->threads == NULL) {
        free(made);
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "calloc",
                          "no memory for a stream of %u threads", threads);
    }
    made->pid = getpid();
    code = init_sync(made);
    if (code != 0) {
        free(made->threads);
        free(made);
        return wsync_fail(err, WSYNC_ERR_OS, code, "pthread_cond_init",
                          "stream of %u threads: %s", threads, strerror(code));
    }
    for (unsigned i = 0; i < threads; i++) {
        code = start_worker(made, &made->threads[i]);
        if (code != 0) {
            status = wsync_fail(err, WSYNC_ERR_OS, code, "pthread_create",
                                "pthread_create: thread %u of %u of a stream: %s", i + 1,
                                threads, strerror(code));
            goto cleanup;
        }
        made->thread_count++;
    }
    *stream = made;
    made = NULL;

cleanup:
    wsync_host_stream_destroy(made);
    return status;
}

bool wsync_host_stream_destroy(wsync_stream_t *stream)
{
    /* In a fork: the threads are the parent's, and the mutex may be held for ever. */
    if (stream == NULL || stream->pid != getpid()) {
        return true;
    }
    (void)pthread_mutex_lock(&stream->mutex);
    stream->stopping = true;
    (void)pthread_cond_broadcast(&stream->work);
    (void)pthread_mutex_unlock(&stream->mutex);
    for (unsigned i = 0; i < stream->thread_count; i++) {
        (void)pthread_join(stream->threads[i], NULL);
    }
    (void)pthread_cond_destroy(&stream->idle);
    (void)pthread_cond_destroy(&stream->work);
    (void)pthread_mutex_destroy(&stream->mutex);
    free(stream->trace);
    free(stream->threads);
    free(stream);
    return true;
}

static wsync_status_t check_process(const wsync_stream_t *stream, wsync_error_t *err)
{
    const pid_t pid = getpid();

    if (stream->pid != pid) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_stream",
                          "the stream was made in process %ld and does not run in its fork "
                          "%ld",
                          (long)stream->pid, (long)pid);
    }
    return WSYNC_OK;
}

/* Copies `entry` to the end of the queue. */
static wsync_status_t enqueue(wsync_stream_t *stream, const entry_t *entry,
                              wsync_error_t *err)
{
    entry_t *made;
    const wsync_status_t status = check_process(stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    made = malloc(sizeof(*made));
    if (made == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "malloc",
                          "no memory for an entry of a stream");
    }
    *made = *entry;
    (void)pthread_mutex_lock(&stream->mutex);
    if (stream->tail != NULL) {
        stream->tail->next = made;
    } else {
        stream->head = made;
    }
    stream->tail = made;
    stream->enqueued++;
    if (stream->head == made) { /* else whoever passes the head goes on with it */
        (void)(made->pieces > 1 ? pthread_cond_broadcast(&stream->work)
                                : pthread_cond_signal(&stream->work));
    }
    (void)pthread_mutex_unlock(&stream->mutex);
    return WSYNC_OK;
}

wsync_status_t wsync_host_stream_copy(wsync_stream_t *stream, const wsync_copy_t *copies,
                                      size_t count, const wsync_span_t *sources,
                                      size_t source_count, const wsync_span_t *destinations,
                                      size_t destination_count, wsync_error_t *err)
{
    entry_t entry = {0};
    const wsync_status_t status = wsync_copies_check(copies, count, sources, source_count,
                                                     destinations, destination_count, err);

    if (status != WSYNC_OK) {
        return status;
    }
    entry.list = wsync_host_list(copies, count, sources, destinations);
    entry.pieces = entry.list.work / PIECE_WORK + (entry.list.work % PIECE_WORK != 0);
    if (entry.pieces == 0) {
        return check_process(stream, err);
    }
    return enqueue(stream, &entry, err);
}

static wsync_status_t enqueue_event(wsync_stream_t *stream, entry_kind_t kind,
                                    wsync_event_t event, uint64_t value, wsync_error_t *err)
{
    const entry_t entry = {.kind = kind, .event = event, .value = value, .pieces = 1};
    wsync_status_t status = wsync_host_event_check(event, err);

    if (status != WSYNC_OK) {
        return status;
    }
    wsync_host_memory_retain(event.memory);
    status = enqueue(stream, &entry, err);
    if (status != WSYNC_OK) {
        wsync_host_memory_destroy(event.memory);
    }
    return status;
}

wsync_status_t wsync_host_stream_record(wsync_stream_t *stream, wsync_event_t event,
                                        uint64_t value, wsync_error_t *err)
{
    return enqueue_event(stream, ENTRY_RECORD, event, value, err);
}

wsync_status_t wsync_host_stream_wait(wsync_stream_t *stream, wsync_event_t event,
                                      uint64_t value, wsync_error_t *err)
{
    return enqueue_event(stream, ENTRY_WAIT, event, value, err);
}

void wsync_host_stream_trace(wsync_stream_t *stream, wsync_stream_span_t *next,
                             size_t capacity, wsync_stream_span_t **spans, size_t *count)
{
    *spans = NULL;
    *count = 0;
    if (stream->pid != getpid()) {
        free(next); /* nothing runs in a fork */
        return;
    }
    (void)pthread_mutex_lock(&stream->mutex);
    *spans = stream->trace;
    *count = stream->trace_count;
    stream->trace = next;
    stream->trace_capacity = next != NULL ? capacity : 0;
    stream->trace_count = 0;
    (void)pthread_mutex_unlock(&stream->mutex);
}

unsigned wsync_host_stream_ahead(wsync_stream_t *stream)
{
    (void)stream;
    return WSYNC_STREAM_AHEAD;
}

bool wsync_host_stream_abandon(wsync_stream_t *stream, int timeout_ms)
{
    uint64_t target;

    (void)timeout_ms; /* a piece of a copy is all there is to wait for */
    if (stream->pid != getpid()) {
        return true; /* nothing runs in a fork */
    }
    (void)pthread_mutex_lock(&stream->mutex);
    target = stream->enqueued;
    stream->abandoners++;
    drop_rest(stream);
    while (stream->passed < target) {
        (void)pthread_cond_wait(&stream->idle, &stream->mutex);
    }
    stream->abandoners--;
    (void)pthread_mutex_unlock(&stream->mutex);
    return true;
}

wsync_status_t wsync_host_stream_synchronize(wsync_stream_t *stream, int timeout_ms,
                                             wsync_error_t *err)
{
    const uint64_t deadline = wsync_host_deadline(timeout_ms);
    const struct timespec until = {
        .tv_sec = (time_t)(deadline / 1000000000),
        .tv_nsec = (long)(deadline % 1000000000),
    };
    wsync_status_t status = check_process(stream, err);
    uint64_t target;
    int code = 0;

    if (status != WSYNC_OK) {
        return status;
    }
    (void)pthread_mutex_lock(&stream->mutex);
    target = stream->enqueued;
    while (stream->passed < target && code != ETIMEDOUT) {
        code = pthread_cond_timedwait(&stream->idle, &stream->mutex, &until);
    }
    if (stream->passed < target) {
        /* No time in the text: callers wait in slices. */
        status = wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "wsync_stream_synchronize",
                            "%" PRIu64 " entries of the stream are not done",
                            target - stream->passed);
    }
    (void)pthread_mutex_unlock(&stream->mutex);
    return status;
}
