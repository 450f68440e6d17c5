/* SPDX-License-Identifier: Apache-2.0
 * Devices: memory that another process can map, streams that run copy lists, and events.
 * Memory and streams know their device, so that no call can be made with two that do not
 * belong together.  Everything above this layer uses only this header. */
#ifndef WSYNC_DEVICE_DEVICE_H
#define WSYNC_DEVICE_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"
#include "core/copy.h"
#include "core/quantise/method.h"
#include "device/memory_pins.h"

typedef struct wsync_memory_ops wsync_memory_ops_t;
typedef struct wsync_stream_ops wsync_stream_ops_t;

enum { WSYNC_DEVICE_UUID_NBYTES = 16, WSYNC_DEVICE_TEXT_NBYTES = 24 };

/* The host, or one GPU.  Lives as long as the process. */
typedef struct wsync_device {
    const wsync_memory_ops_t *memory_ops;
    const wsync_stream_ops_t *stream_ops;
    const char *name; /* "host", "cuda" */
    bool wakes;       /* a record wakes waiters; else they poll */
    int ordinal;      /* among the GPUs of the process; -1: the host */
    uint8_t uuid[WSYNC_DEVICE_UUID_NBYTES]; /* all zero: the host */
} wsync_device_t;

/* Memory that another process can map.  A backend's record of it begins with this. */
typedef struct wsync_memory {
    const wsync_device_t *device;
    void *data;           /* of the device; stays the same while the memory is parked */
    unsigned char *words; /* where the host reaches events in it; NULL: it holds none */
    uint64_t nbytes;
    int fd;    /* what a peer maps, borrowed; -1 while the memory is parked */
    int *more; /* owned; further descriptors that a peer needs, of what is lent in pieces */
    size_t more_count;
    bool lent; /* a peer's, only for reading */
    atomic_uint references;
    wsync_pins_t pins;
} wsync_memory_t;

/* A backend's record of a stream begins with this. */
typedef struct wsync_stream {
    const wsync_device_t *device;
} wsync_stream_t;

/* A sequence number in memory that both processes map.  It only grows.  Recording value n
 * means: everything enqueued on the stream before has happened. */
typedef struct wsync_event {
    wsync_memory_t *memory; /* control memory, borrowed; a stream retains it as long as it
                             * needs it */
    uint64_t offset;        /* of an aligned 64-bit word */
} wsync_event_t;

/* When a batch of copies ran: nanoseconds of CLOCK_MONOTONIC. */
typedef struct wsync_stream_span {
    uint64_t begin;
    uint64_t end;
} wsync_stream_span_t;

/* A list of copies and the buffers that they name. */
typedef struct wsync_batch {
    const wsync_copy_t *copies;
    size_t count;
    const wsync_span_t *sources;
    size_t source_count;
    const wsync_span_t *destinations;
    size_t destination_count;
    /* Of the lists: numbers that no other list has (of copies: none at the same address),
     * so that a stream may keep what it has found out about one; or 0. */
    uint64_t copies_id;
    uint64_t sources_id;
    uint64_t destinations_id;
    /* All spans of the list lie in memory of the stream's device: it need not be asked. */
    bool sources_resident;
    bool destinations_resident;
} wsync_batch_t;

/* What a pass does: AMAXES raises the entries that pieces have in the table of amaxes to
 * those of their elements (the caller has set them to 0); CODES writes scales
 * and codes of all pieces into the image. */
typedef enum wsync_quantise_pass {
    WSYNC_QUANTISE_AMAXES,
    WSYNC_QUANTISE_CODES,
} wsync_quantise_pass_t;

/* A list of pieces, which share no bytes of the image, and what they name.  All memory is
 * the device's. */
typedef struct wsync_quantise_batch {
    const wsync_quantise_piece_t *pieces;
    size_t count;
    const wsync_span_t *sources;
    size_t source_count;
    wsync_span_t image;
    wsync_span_t amaxes; /* float[] */
    wsync_quantise_pass_t pass;
} wsync_quantise_batch_t;

/* The most waits that may lie ahead of what a stream has passed.  A device's queue that is
 * full blocks its caller, for ever if the process that is waited for is gone. */
enum { WSYNC_STREAM_AHEAD = 64, WSYNC_STREAM_MAX_THREADS = 64 };

/* What a backend does.  Callers use the functions below, which check the arguments; the
 * contracts are theirs. */
struct wsync_memory_ops {
    /* Allocates memory (fd -1), or maps what a peer exported; `control`: for events. */
    wsync_status_t (*make)(const wsync_device_t *self, bool control, int fd,
                           uint64_t nbytes, wsync_memory_t **memory, wsync_error_t *err);
    wsync_status_t (*borrow)(const wsync_device_t *self, const int *fds, size_t count,
                             wsync_memory_t **memory, wsync_error_t *err);
    /* NULL: it cannot shrink. */
    wsync_status_t (*check_lent)(const wsync_memory_t *memory, wsync_error_t *err);
    void (*destroy)(wsync_memory_t *memory); /* the last reference is gone */
    wsync_status_t (*park)(wsync_memory_t *memory, wsync_error_t *err);
    wsync_status_t (*unpark)(wsync_memory_t *memory, int fd, wsync_error_t *err);
};

struct wsync_stream_ops {
    wsync_status_t (*create)(const wsync_device_t *self, unsigned threads,
                             wsync_stream_t **stream, wsync_error_t *err);
    bool (*destroy)(wsync_stream_t *stream);
    wsync_status_t (*copy)(wsync_stream_t *stream, const wsync_batch_t *batch,
                           wsync_error_t *err);
    wsync_status_t (*quantise)(wsync_stream_t *stream, const wsync_quantise_batch_t *batch,
                               wsync_error_t *err);
    /* A wait for the event to be `value`, or its record. */
    wsync_status_t (*enqueue)(wsync_stream_t *stream, bool waits, wsync_event_t event,
                              uint64_t value, wsync_error_t *err);
    /* NULL for all where there are no foreign streams. */
    wsync_status_t (*settle)(const wsync_device_t *self, wsync_error_t *err);
    unsigned (*ahead)(wsync_stream_t *stream); /* NULL: always the most */
    void *(*handle)(wsync_stream_t *stream);   /* NULL: it has none */
    bool (*abandon)(wsync_stream_t *stream, int timeout_ms);
    wsync_status_t (*synchronize)(wsync_stream_t *stream, int timeout_ms,
                                  wsync_error_t *err);
    void (*trace)(wsync_stream_t *stream, wsync_stream_span_t *next, size_t capacity,
                  wsync_stream_span_t **spans, size_t *count);
};

/* The host: memfd memory, worker threads as streams. */
const wsync_device_t *wsync_device_host(void);
/* "the host", "GPU 1" */
const char *wsync_device_text(const wsync_device_t *device,
                              char text[WSYNC_DEVICE_TEXT_NBYTES]);

/* Memory of exactly nbytes, usable at once at full speed, zeroed, and exportable. */
wsync_status_t wsync_memory_create(const wsync_device_t *self, uint64_t nbytes,
                                   wsync_memory_t **memory, wsync_error_t *err);
/* Maps what a peer exported.  fd is borrowed.  REFUSED if the descriptor is not sealed
 * against shrinking and growing, or has no memory yet for some of its bytes; INVALID if its
 * size is not nbytes: never a fault later. */
wsync_status_t wsync_memory_import(const wsync_device_t *self, int fd, uint64_t nbytes,
                                   wsync_memory_t **memory, wsync_error_t *err);
/* The same for memory that holds events and nothing else: host and device reach its words.
 * It is memory in all other respects. */
wsync_status_t wsync_control_create(const wsync_device_t *self, uint64_t nbytes,
                                    wsync_memory_t **memory, wsync_error_t *err);
wsync_status_t wsync_control_import(const wsync_device_t *self, int fd, uint64_t nbytes,
                                    wsync_memory_t **memory, wsync_error_t *err);
/* Maps memory that a peer lends, whatever has made it, only for reading: all that fds[0]
 * holds now.  Descriptors are borrowed, and duplicates kept.  On the host: REFUSED unless
 * it is of shared memory (a memfd, a file of /dev/shm), which no third process changes; the
 * others are only kept, so that it can be lent on.  On a GPU: what wsync_cuda_lend has made
 * there (REFUSED for anything else), mapped read-only where the driver can. */
wsync_status_t wsync_memory_borrow(const wsync_device_t *self, const int *fds, size_t count,
                                   wsync_memory_t **memory, wsync_error_t *err);
/* REFUSED if memory that was borrowed has shrunk: reading it would end the process. */
wsync_status_t wsync_memory_check_lent(const wsync_memory_t *memory, wsync_error_t *err);
/* For backends: keeps duplicates of further descriptors (all but the first), or gives them
 * back. */
wsync_status_t wsync_memory_keep_more(wsync_memory_t *memory, const int *fds, size_t count,
                                      wsync_error_t *err);
void wsync_memory_close_more(wsync_memory_t *memory);
/* Memory is counted: it is created with one reference, retain adds one and destroy drops
 * one; the last one unmaps.  Both may be called from any thread. */
void wsync_memory_retain(wsync_memory_t *memory);
void wsync_memory_destroy(wsync_memory_t *memory); /* NULL is a no-op */
/* For backends: a record with one reference and no descriptor. */
void wsync_memory_init(wsync_memory_t *memory, const wsync_device_t *device,
                       uint64_t nbytes);

/* Pins the memory until unpin, for a user of the bytes that no stream knows of, like a
 * tensor that is a view of them.  STATE if it is parked.  From any thread. */
wsync_status_t wsync_memory_pin(wsync_memory_t *memory, wsync_error_t *err);
void wsync_memory_unpin(wsync_memory_t *memory);
/* Gives the bytes back but not their addresses, which nothing may touch until unpark; no
 * stream may still use them.  The bytes are free once every process that maps them has
 * parked or destroyed its memory.  STATE, with everything as it was, if the memory is
 * pinned or parked; UNSUPPORTED if it is of a kind that cannot be parked.  After another
 * error it is parked if a part of it is gone. */
wsync_status_t wsync_memory_park(wsync_memory_t *memory, wsync_error_t *err);
/* Puts memory at the addresses again: its own (fd -1), with any contents and a new
 * descriptor, or a peer's, by the rules of wsync_memory_import.  After an error it is
 * parked as before.  STATE if it is not parked. */
wsync_status_t wsync_memory_unpark(wsync_memory_t *memory, int fd, wsync_error_t *err);

/* A stream runs what is enqueued in order, on `threads` workers (1 to
 * WSYNC_STREAM_MAX_THREADS). */
wsync_status_t wsync_stream_create(const wsync_device_t *self, unsigned threads,
                                   wsync_stream_t **stream, wsync_error_t *err);
/* Waits for what is enqueued, up to the first wait whose event has not come; drops the rest
 * and joins.  NULL is a no-op.  False if a device that has hung may still run it, as with
 * abandon. */
bool wsync_stream_destroy(wsync_stream_t *stream);
/* INVALID, which names both devices, unless the stream is of this one, the device of
 * `what`. */
wsync_status_t wsync_stream_check(const wsync_stream_t *stream,
                                  const wsync_device_t *device, const char *what,
                                  wsync_error_t *err);
/* Enqueues a batch of copies; on error nothing was enqueued, unless a device failed
 * halfway: then the stream has been abandoned.  Checks bounds first (wsync_copies_check).
 * The copies, the spans and the memory they name are borrowed until the stream has passed
 * this point. */
wsync_status_t wsync_stream_copy(wsync_stream_t *stream, const wsync_batch_t *batch,
                                 wsync_error_t *err);
/* The same of lists that have no ids. */
wsync_status_t wsync_stream_copy_list(wsync_stream_t *stream, const wsync_copy_t *copies,
                                      size_t count, const wsync_span_t *sources,
                                      size_t source_count, const wsync_span_t *destinations,
                                      size_t destination_count, wsync_error_t *err);
/* Enqueues one pass over pieces, in order with all else.  Checks first that all they touch
 * is there (wsync_quantise_check).  The pieces, the spans' memory and `sources` are
 * borrowed until the stream has passed this point.  UNSUPPORTED on a GPU, which names the
 * buffer: pageable memory of the host that it does not reach, weights included; or the
 * tensor: 2^30 rows or columns and more, or rows that are 2 GiB apart.  After an error
 * nothing was enqueued, as with copies. */
wsync_status_t wsync_stream_quantise(wsync_stream_t *stream,
                                     const wsync_quantise_batch_t *batch,
                                     wsync_error_t *err);
/* Enqueues: set the event to `value` and wake its waiters.  INVALID for an event of another
 * device, or one that is not an aligned word of control memory. */
wsync_status_t wsync_stream_record(wsync_stream_t *stream, wsync_event_t event,
                                   uint64_t value, wsync_error_t *err);
/* Enqueues: what follows starts when the event is at least `value`.  INVALID as above. */
wsync_status_t wsync_stream_wait(wsync_stream_t *stream, wsync_event_t event,
                                 uint64_t value, wsync_error_t *err);
/* Waits until a GPU has done everything that this process has given it by now, on whatever
 * stream, without an end.  Nothing to do on the host. */
wsync_status_t wsync_device_settle(const wsync_device_t *self, wsync_error_t *err);
/* The driver's handle, for a library that enqueues on it what the stream does not know of;
 * NULL on the host. */
void *wsync_stream_handle(wsync_stream_t *stream);
/* How many waits may lie ahead of what the stream has passed: 0 while batches like the last
 * one may block their caller until these are over. */
unsigned wsync_stream_ahead(wsync_stream_t *stream);
/* Gives up waits, drops what has not begun (its records never happen), and returns when
 * nothing of what was enqueued runs any more.  The stream can be used again.  A GPU cannot
 * drop queued work: giving up a wait sets its word, and copies and records behind it still
 * run.  So do not commit after abandoning a stream, nor after seeing records of one that
 * was abandoned.  False if the device has hung for timeout_ms: what was enqueued
 * may then run at any time, and what it uses has to stay. */
bool wsync_stream_abandon(wsync_stream_t *stream, int timeout_ms);
/* Waits in the calling thread until the stream is idle.  TIMEOUT after timeout_ms. */
wsync_status_t wsync_stream_synchronize(wsync_stream_t *stream, int timeout_ms,
                                        wsync_error_t *err);
/* Hands over, in order, when the batches since the last call ran, and notes those that end
 * from now on in `next`, up to its capacity.  Arrays are malloc's and move; NULL: nothing
 * was, or is to be, noted. */
void wsync_stream_trace(wsync_stream_t *stream, wsync_stream_span_t *next, size_t capacity,
                        wsync_stream_span_t **spans, size_t *count);

/* INVALID unless the event is an aligned word of control memory. */
wsync_status_t wsync_event_check(wsync_event_t event, wsync_error_t *err);
/* A thread that sees the value also sees everything that this thread wrote before.  A value
 * below the present one changes nothing. */
void wsync_event_set(wsync_event_t event, uint64_t value);
/* Waits in the calling thread until the event is at least `value`. */
wsync_status_t wsync_event_wait(wsync_event_t event, uint64_t value, int timeout_ms,
                                wsync_error_t *err);
uint64_t wsync_event_query(wsync_event_t event);

#endif
