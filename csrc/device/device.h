/* SPDX-License-Identifier: Apache-2.0
 * Devices: memory that another process can map, streams that run copy lists, and events.
 * Each backend fills one ops table; everything above uses only this header. */
#ifndef WSYNC_DEVICE_DEVICE_H
#define WSYNC_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/copy.h"
#include "core/status.h"

typedef struct wsync_memory wsync_memory_t;
typedef struct wsync_stream wsync_stream_t;

/* A sequence number in memory that both processes map.  It only grows.  Recording value n
 * means: everything enqueued on the stream before has happened. */
typedef struct wsync_event {
    wsync_memory_t *memory; /* control memory, borrowed; streams retain it while they have
                             * to do with it */
    uint64_t offset;        /* of an aligned 64-bit word */
} wsync_event_t;

/* When a batch of copies ran: nanoseconds of CLOCK_MONOTONIC. */
typedef struct wsync_stream_span {
    uint64_t begin;
    uint64_t end;
} wsync_stream_span_t;

/* Which device a backend is of. */
enum { WSYNC_DEVICE_UUID_NBYTES = 16 };
typedef struct wsync_device_identity {
    uint8_t uuid[WSYNC_DEVICE_UUID_NBYTES]; /* all zero: the host */
    int ordinal;                            /* among those the process sees; -1: the host */
} wsync_device_identity_t;

/* The most waits that lie ahead of what a stream has passed: a device's queue that is full
 * keeps its caller, for ever if the one who is waited for is gone. */
enum { WSYNC_STREAM_AHEAD = 64 };

typedef struct wsync_device_ops {
    const char *name; /* "host", "cuda" */
    wsync_device_identity_t (*identity)(void);

    /* Memory of exactly nbytes, usable at once at full speed, zeroed, and exportable. */
    wsync_status_t (*memory_create)(uint64_t nbytes, wsync_memory_t **memory,
                                    wsync_error_t *err);
    /* Maps what a peer exported.  fd is borrowed.  REFUSED if the descriptor is not sealed
     * against shrinking and growing, or has no memory for some of its bytes yet; INVALID if
     * its size is not nbytes: never a fault later. */
    wsync_status_t (*memory_import)(int fd, uint64_t nbytes, wsync_memory_t **memory,
                                    wsync_error_t *err);
    /* The same for memory that holds events and nothing else: host and device reach its
     * words.  It is memory in all other respects. */
    wsync_status_t (*control_create)(uint64_t nbytes, wsync_memory_t **memory,
                                     wsync_error_t *err);
    wsync_status_t (*control_import)(int fd, uint64_t nbytes, wsync_memory_t **memory,
                                     wsync_error_t *err);
    /* Memory is counted: it is created with one reference, retain adds one and destroy
     * drops one; the last one unmaps.  Both may be called from any thread. */
    void (*memory_retain)(wsync_memory_t *memory);
    void (*memory_destroy)(wsync_memory_t *memory); /* NULL is a no-op */
    void *(*memory_data)(const wsync_memory_t *memory);
    uint64_t (*memory_nbytes)(const wsync_memory_t *memory);
    int (*memory_fd)(const wsync_memory_t *memory); /* borrowed; -1 while it is parked */

    /* Who looks at the bytes on their own account, like a tensor that is a view of them,
     * pins the memory for as long.  STATE if it is parked.  From any thread. */
    wsync_status_t (*memory_pin)(wsync_memory_t *memory, wsync_error_t *err);
    void (*memory_unpin)(wsync_memory_t *memory);
    /* Gives the bytes back and keeps their addresses, which nothing may touch until unpark:
     * no stream has to do with them any more.  They are free once every process that maps
     * them has parked or destroyed its memory.  STATE, with everything as it was, if the
     * memory is pinned or parked; UNSUPPORTED if it is of a kind that cannot be parked. */
    wsync_status_t (*memory_park)(wsync_memory_t *memory, wsync_error_t *err);
    /* Has the addresses hold memory again: of its own, with any contents and a descriptor
     * of its own (fd -1), or a peer's, by the rules of memory_import.  After an error it is
     * parked as before.  STATE if it is not parked. */
    wsync_status_t (*memory_unpark)(wsync_memory_t *memory, int fd, wsync_error_t *err);

    /* A stream runs what is enqueued in order, on `threads` workers (>= 1). */
    wsync_status_t (*stream_create)(unsigned threads, wsync_stream_t **stream,
                                    wsync_error_t *err);
    /* Waits for what is enqueued, up to the first wait whose event has not come; drops the
     * rest and joins.  False if a device that has hung may run it yet, as with abandon. */
    bool (*stream_destroy)(wsync_stream_t *stream);
    /* Enqueues the copies; on error nothing was enqueued, unless a device failed halfway:
     * then the stream has been abandoned.  Checks bounds first (wsync_copies_check).
     * copies, the spans and the memory they name are borrowed until the stream has passed
     * this point. */
    wsync_status_t (*stream_copy)(wsync_stream_t *stream, const wsync_copy_t *copies,
                                  size_t count, const wsync_span_t *sources,
                                  size_t source_count, const wsync_span_t *destinations,
                                  size_t destination_count, wsync_error_t *err);
    /* Enqueues: set the event to `value` and wake its waiters. */
    wsync_status_t (*stream_record)(wsync_stream_t *stream, wsync_event_t event,
                                    uint64_t value, wsync_error_t *err);
    /* Enqueues: what follows starts when the event is at least `value`. */
    wsync_status_t (*stream_wait)(wsync_stream_t *stream, wsync_event_t event,
                                  uint64_t value, wsync_error_t *err);
    /* Enqueues: what follows starts when everything has happened that somebody else's
     * stream of this device has been given by now.  `other` is the driver's handle (NULL:
     * the default stream).  Nothing to do on the host. */
    wsync_status_t (*stream_follow)(wsync_stream_t *stream, void *other,
                                    wsync_error_t *err);
    /* The other way round: what `other` is given from now on starts when everything has
     * happened that was enqueued here. */
    wsync_status_t (*stream_lead)(wsync_stream_t *stream, void *other, wsync_error_t *err);
    /* How many waits may lie ahead of what the stream has passed: 0 while batches like the
     * last one may keep their caller until these are over. */
    unsigned (*stream_ahead)(wsync_stream_t *stream);
    /* Gives up waits, drops what has not begun (its records never happen), and returns when
     * nothing of what was enqueued runs any more.  The stream can be used again.  A device
     * has begun all that was enqueued: behind a wait that was given up, whose word then has
     * the value, copies run and records happen.  So who abandons a stream does not commit,
     * nor do those who heard of its records.  False if the device has hung, or is kept by
     * somebody else's stream that was followed, for timeout_ms: what was enqueued may run
     * at any time yet, and what it uses has to stay. */
    bool (*stream_abandon)(wsync_stream_t *stream, int timeout_ms);
    /* Waits in the calling thread until the stream is idle.  TIMEOUT after timeout_ms. */
    wsync_status_t (*stream_synchronize)(wsync_stream_t *stream, int timeout_ms,
                                         wsync_error_t *err);
    /* Hands over, in order, when the batches since the last call ran, and has those that
     * end from now on noted in `next`, up to its capacity.  Arrays are malloc's and move;
     * NULL: nothing was, or is to be, noted. */
    void (*stream_trace)(wsync_stream_t *stream, wsync_stream_span_t *next, size_t capacity,
                         wsync_stream_span_t **spans, size_t *count);

    /* Waits in the calling thread until the event is at least `value`. */
    wsync_status_t (*event_wait)(wsync_event_t event, uint64_t value, int timeout_ms,
                                 wsync_error_t *err);
    uint64_t (*event_query)(wsync_event_t event);
} wsync_device_ops_t;

/* The host backend: memfd memory, worker threads as streams. */
const wsync_device_ops_t *wsync_device_host(void);

#endif
