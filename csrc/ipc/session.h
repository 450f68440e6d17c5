/* SPDX-License-Identifier: Apache-2.0
 * A session: one trainer rank (exporter) fills a ring that one engine worker (importer)
 * reads.  Two state machines over one channel.
 *
 *   exporter                          importer
 *   accept       <------- HELLO ----- create        once; carries the worker's layout
 *   attach       -- ATTACH(ring) ---> begin         once per plan
 *   begin        -- BEGIN(update) --> begin
 *   begun        <------ BEGUN -----                where the exporter wants to know
 *   acquire                           take k        ROUND announces, the ready event orders
 *   post k       -- ROUND k -------->
 *                <------- DONE k ---- done k        the slot may be written again
 *   prepared     <--- PREPARED ------ prepared      count, bytes, audit_ns
 *   commit       -- COMMIT ---------> verdict       or ABORT(text)
 *   park         <------- PARKED ----               where COMMIT asked for it
 *
 * A rank can lend memory beside a ring, which may then be one of a byte: before BEGIN,
 * LEND carries the descriptor of a segment, which the worker maps, and BIND says where in
 * these segments the first buffers of the manifest lie; those after them are the rounds.
 * Both are sent again only when something has changed.  ROUND 0 also says that the lent
 * bytes may be read, and DONE 0 that they have been.
 *
 * Between updates the ring can be parked: its memory is given back, and its addresses stay
 * reserved (wsync_memory_park).  The worker parks its side within the verdict and says so,
 * then the exporter parks its own.  The next BEGIN carries the descriptor of new memory,
 * which both sides map at the old addresses, so that no copies have to be planned again.
 * When it parks, the worker also gives back what was lent to it, which then has to be sent
 * again.  A worker whose ring is pinned, or of a kind that cannot be parked, says why; then
 * both sides keep the ring.
 *
 * Either side may send FAILED(text) at any time during an update; the other gets it as
 * WSYNC_ERR_REMOTE from whatever it waits for.  Every wait takes a timeout; TIMEOUT leaves
 * the session as it was, so a caller can wait in slices.  After any other error only fail,
 * abort and destroy are allowed.  A call out of order is WSYNC_ERR_STATE, and changes
 * nothing.
 *
 * Rounds are posted, taken and done in order: all posts use one stream, all takes one, and
 * all dones one.  So what is recorded for a round also covers all rounds before it.  With
 * streams on both sides no host thread waits for data: both run ahead by as many rounds as
 * the ring has slots, 64 at most.  A stream of another device than the ring's is INVALID,
 * and changes nothing.  One thread at a time may use a session. */
#ifndef WSYNC_IPC_SESSION_H
#define WSYNC_IPC_SESSION_H

#include "device/device.h"
#include "ipc/channel.h"

/* What a worker reports to have loaded. */
typedef struct wsync_receipt {
    uint64_t tensor_count;
    uint64_t nbytes;
    uint64_t audit_ns; /* how long the worker took to see that its loader is what it was */
} wsync_receipt_t;

/* Where a buffer of a manifest lies in lent memory. */
typedef struct wsync_binding {
    uint64_t segment; /* what wsync_exporter_lend has called it; WSYNC_UNBOUND: nowhere */
    uint64_t offset;
    uint64_t nbytes;
} wsync_binding_t;

#define WSYNC_UNBOUND UINT64_MAX

/* Rounds of one update: what a worker keeps for each is bounded by this. */
enum { WSYNC_SESSION_MAX_ROUNDS = 1 << 20 };

typedef struct wsync_exporter wsync_exporter_t;
typedef struct wsync_importer wsync_importer_t;

/* Listens in a private directory with a fresh random token. */
wsync_status_t wsync_exporter_create(const char *parent, wsync_exporter_t **exporter,
                                     wsync_error_t *err);
void wsync_exporter_destroy(wsync_exporter_t *exporter);
const char *wsync_exporter_path(const wsync_exporter_t *exporter);
const uint8_t *wsync_exporter_token(const wsync_exporter_t *exporter);

/* Waits for the worker.  *blob (owned by the caller, free()) holds the bytes that were
 * given to wsync_importer_create. */
wsync_status_t wsync_exporter_accept(wsync_exporter_t *exporter, int timeout_ms,
                                     uint8_t **blob, size_t *nbytes, wsync_error_t *err);
/* The device that the worker is on (all zero: the host), once it has been accepted. */
const uint8_t *wsync_exporter_worker_uuid(const wsync_exporter_t *exporter);
/* Sends ring and manifest (copied into a sealed memfd).  The exporter retains the ring
 * until the next attach or destroy.  INVALID names both devices if it is not on the
 * worker's, STATE if it is parked. */
wsync_status_t wsync_exporter_attach(wsync_exporter_t *exporter, wsync_memory_t *ring,
                                     const uint8_t *manifest, size_t nbytes, int timeout_ms,
                                     wsync_error_t *err);
/* Lends memory, made here or borrowed, from now on until a bind that does not name it, or
 * until the ring is parked.
 * *segment is its number in this session.  The memory can be let go of at once. */
wsync_status_t wsync_exporter_lend(wsync_exporter_t *exporter, const wsync_memory_t *memory,
                                   int timeout_ms, uint64_t *segment, wsync_error_t *err);
/* Says where the manifest's buffers lie (copied into a sealed memfd).  Holds until the next
 * bind or attach. */
wsync_status_t wsync_exporter_bind(wsync_exporter_t *exporter,
                                   const wsync_binding_t *bindings, size_t count,
                                   int timeout_ms, wsync_error_t *err);
/* INVALID beyond WSYNC_SESSION_MAX_ROUNDS.  Unparks a ring that is parked; if that fails,
 * for want of memory, the session is as it was. */
wsync_status_t wsync_exporter_begin(wsync_exporter_t *exporter, uint64_t update,
                                    uint32_t round_count, int timeout_ms,
                                    wsync_error_t *err);
/* Waits until the worker has seen the begin, and has mapped all that was lent before it. */
wsync_status_t wsync_exporter_begun(wsync_exporter_t *exporter, int timeout_ms,
                                    wsync_error_t *err);
/* Has `stream` wait until the worker has finished `wait_round` (-1: nothing to wait for);
 * returns when the worker has enqueued the end of that round.  Without a stream (NULL) the
 * calling thread waits. */
wsync_status_t wsync_exporter_acquire(wsync_exporter_t *exporter, int64_t wait_round,
                                      wsync_stream_t *stream, int timeout_ms,
                                      wsync_error_t *err);
/* Polls: reports a failure that the worker has sent, or that it is gone.  OK before a
 * worker has connected. */
wsync_status_t wsync_exporter_look(wsync_exporter_t *exporter, wsync_error_t *err);
/* Rounds of this update that the worker has finished, as far as is known without
 * waiting. */
uint32_t wsync_exporter_loaded(const wsync_exporter_t *exporter);
/* Announces `round`, ready when `stream` gets here.  Rounds are posted in order. */
wsync_status_t wsync_exporter_post(wsync_exporter_t *exporter, uint32_t round,
                                   wsync_stream_t *stream, int timeout_ms,
                                   wsync_error_t *err);
wsync_status_t wsync_exporter_prepared(wsync_exporter_t *exporter, int timeout_ms,
                                       wsync_receipt_t *receipt, wsync_error_t *err);
/* Ends the update.  The session is ready for the next begin; or, with park, for
 * wsync_exporter_park, which has to come before that. */
wsync_status_t wsync_exporter_commit(wsync_exporter_t *exporter, bool park, int timeout_ms,
                                     wsync_error_t *err);
/* Waits until the worker has parked its side of the ring, then parks the other.  REFUSED:
 * it stays where it is on one side or on both, and the session goes on; the text says why.
 * If the worker is gone this side is parked all the same, and the session has ended.  The
 * update has been committed in any case. */
wsync_status_t wsync_exporter_park(wsync_exporter_t *exporter, int timeout_ms,
                                   wsync_error_t *err);
/* Ends the update with an error; never fails (a worker that does not get the text sees the
 * end of file).  The session is closed. */
void wsync_exporter_abort(wsync_exporter_t *exporter, const char *text);

/* Connects and shows token and blob (copied into a sealed memfd). */
wsync_status_t wsync_importer_create(const wsync_device_t *device, const char *path,
                                     const uint8_t token[WSYNC_TOKEN_NBYTES],
                                     const uint8_t *blob, size_t nbytes, int timeout_ms,
                                     wsync_importer_t **importer, wsync_error_t *err);
void wsync_importer_destroy(wsync_importer_t *importer);
/* Waits for BEGIN, taking an ATTACH and what is lent before it if there is any, and unparks
 * the ring if it is parked.  REFUSED if what is lent is no shared memory, or has shrunk;
 * PROTOCOL if a buffer is bound to bytes that no segment has. */
wsync_status_t wsync_importer_begin(wsync_importer_t *importer, int timeout_ms,
                                    uint64_t *update, uint32_t *round_count,
                                    wsync_error_t *err);
/* Counts attaches: a change means that ring and manifest are new ones.  Both are borrowed
 * until the next begin; retain the ring to keep it for longer. */
uint64_t wsync_importer_generation(const wsync_importer_t *importer);
wsync_memory_t *wsync_importer_ring(const wsync_importer_t *importer);
const uint8_t *wsync_importer_manifest(const wsync_importer_t *importer, size_t *nbytes);
/* The segments that are lent, in the order in which they came; changed and dropped by
 * begin. */
wsync_memory_t *const *wsync_importer_segments(const wsync_importer_t *importer,
                                               size_t *count);
/* Where the manifest's buffers lie in them, and how often that was said: 0 and NULL since
 * the last attach if nothing is lent.  Borrowed until the next begin. */
const wsync_span_t *wsync_importer_bound(const wsync_importer_t *importer, size_t *count,
                                         uint64_t *generation);
/* Has `stream` wait until `round` lies in the ring; returns when it has been announced.
 * Without a stream (NULL) the calling thread waits. */
wsync_status_t wsync_importer_take(wsync_importer_t *importer, uint32_t round,
                                   wsync_stream_t *stream, int timeout_ms,
                                   wsync_error_t *err);
/* Waits in the calling thread until `round`, which has been taken, lies in the ring. */
wsync_status_t wsync_importer_wait(wsync_importer_t *importer, uint32_t round,
                                   int timeout_ms, wsync_error_t *err);
/* Rounds of this update that have been taken and lie in the ring, as far as is known
 * without waiting. */
uint32_t wsync_importer_arrived(const wsync_importer_t *importer);
/* Gives the slot back when `stream` gets here (NULL: now). */
wsync_status_t wsync_importer_done(wsync_importer_t *importer, uint32_t round,
                                   wsync_stream_t *stream, int timeout_ms,
                                   wsync_error_t *err);
wsync_status_t wsync_importer_prepared(wsync_importer_t *importer,
                                       const wsync_receipt_t *receipt, int timeout_ms,
                                       wsync_error_t *err);
/* WSYNC_OK: committed, and if the exporter asked for it the ring is parked and lent memory
 * is given back, unless there are pins on it: what was enqueued on it must have run.
 * REMOTE: aborted, with the exporter's text. */
wsync_status_t wsync_importer_verdict(wsync_importer_t *importer, int timeout_ms,
                                      wsync_error_t *err);
/* Tells the exporter that the update failed here; never fails.  The session is closed. */
void wsync_importer_fail(wsync_importer_t *importer, const char *text);

#endif
