/* SPDX-License-Identifier: Apache-2.0
 * The planner: source layout x destination layouts -> rounds of copies and messages.
 * Deterministic: every rank that is given the same specification decides the same rounds,
 * and emits only its own copies. */
#ifndef WSYNC_CORE_PLAN_PLAN_H
#define WSYNC_CORE_PLAN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"
#include "core/copy.h"
#include "core/layout/layout.h"

/* What a set of engine workers wants.  Only tensors and boxes of `layout` are read.  A
 * `whole` destination wants every tensor of its layout whole, or, where that has boxes of
 * it, each of these whole.  No round boundary falls inside such a box, a tensor or a group
 * (wsync_tensor_t) of its layout or of the source's; a tensor of several boxes is in no
 * group.  Any other destination wants only the boxes, which may be cut. */
typedef struct wsync_destination {
    const wsync_layout_t *layout; /* borrowed until wsync_plan_create returns */
    bool whole;
} wsync_destination_t;

/* One engine worker: what it wants, and the rank that fills its ring: the trainer rank that
 * holds its session, or the worker's own where it takes part in the exchange itself. */
typedef struct wsync_worker {
    uint32_t destination;
    uint32_t home;
} wsync_worker_t;

typedef struct wsync_plan_spec {
    const wsync_layout_t *source;
    const wsync_destination_t *destinations;
    const wsync_worker_t *workers;
    const uint32_t *hosts; /* host of every rank */
    uint32_t destination_count;
    uint32_t worker_count;
    uint32_t rank_count;
    uint32_t rank; /* whose copies are emitted */
    /* Budgets in bytes.  Every box and every piece of a message counts with its padding to
     * 64 bytes.  0 takes the default:
     *   round      32 MiB, or a quarter of an explicit ring if that is less
     *   ring       four rounds; at least 256 KiB and any two successive rounds
     *   send, recv as large as a round
     * No ring is larger than all that its worker gets.  What cannot be cut may exceed a
     * default, and round_nbytes if `rounds_grow`.  If it exceeds another explicit budget
     * the plan is INVALID, and the message names both. */
    uint64_t round_nbytes; /* slot of one worker in one round */
    uint64_t ring_nbytes;  /* all slots of one worker */
    uint64_t send_nbytes;  /* send staging of one rank in one round */
    uint64_t recv_nbytes;  /* receive staging of one rank in one round */
    bool rounds_grow;
} wsync_plan_spec_t;

typedef enum wsync_phase {
    WSYNC_PHASE_PACK,   /* parameter buffer -> message */
    WSYNC_PHASE_LOCAL,  /* parameter buffer -> ring of a worker whose home is this rank */
    WSYNC_PHASE_UNPACK, /* message -> ring of a worker whose home is this rank */
    WSYNC_PHASE_COUNT,
} wsync_phase_t;

/* Equal bytes from one rank to one or more others in one round.  In the copies of the round
 * a message is the buffer whose index is its position in the round's message list. */
typedef struct wsync_message {
    uint32_t source;
    uint32_t peer_count;
    const uint32_t *peers; /* ascending; never contains source */
    /* In the staging of this round: the source's to send, and this rank's to receive, which
     * is undefined if it is the source.  Multiples of 128, or of 64 where the messages
     * would exceed a budget that was asked for. */
    uint64_t send_offset;
    uint64_t recv_offset;
    uint64_t nbytes;
} wsync_message_t;

/* Where a round lies in a worker's ring.  It may be written once the worker has finished
 * round wait_round (-1: at once). */
typedef struct wsync_slot {
    uint64_t offset;
    uint64_t nbytes;
    int64_t wait_round;
} wsync_slot_t;

/* Of all ranks and rounds.  Both of the first count the dtype that is delivered. */
typedef struct wsync_plan_stats {
    uint64_t delivered_nbytes; /* bytes written into the rings of all workers */
    uint64_t needed_nbytes;    /* for each worker the union of the boxes it reads */
    uint64_t sent_nbytes;      /* bytes of all messages with padding, once a peer */
    uint64_t message_count;
} wsync_plan_stats_t;

typedef struct wsync_plan wsync_plan_t;

/* LAYOUT: a destination box that no source holds, overlapping boxes of different origins
 * (both named), destination boxes of one worker that overlap, disagreeing shapes or
 * dtypes. */
wsync_status_t wsync_plan_create(const wsync_plan_spec_t *spec, wsync_plan_t **plan,
                                 wsync_error_t *err);
void wsync_plan_destroy(wsync_plan_t *plan);

uint32_t wsync_plan_round_count(const wsync_plan_t *plan);
/* At most so many bytes of a round are one worker's, but for a larger tensor that stays
 * whole. */
uint64_t wsync_plan_round_nbytes(const wsync_plan_t *plan);
uint32_t wsync_plan_worker_count(const wsync_plan_t *plan);
/* In the destination tables of LOCAL and UNPACK the buffer index is the worker's index and
 * offsets count from the start of its ring; PACK and LOCAL sources are the rank's parameter
 * buffers. */
const wsync_copy_t *wsync_plan_copies(const wsync_plan_t *plan, uint32_t round,
                                      wsync_phase_t phase, size_t *count);
/* Messages that this rank sends or receives in the round, in an order that is the same on
 * both ends. */
const wsync_message_t *wsync_plan_messages(const wsync_plan_t *plan, uint32_t round,
                                           size_t *count);
wsync_slot_t wsync_plan_slot(const wsync_plan_t *plan, uint32_t worker, uint32_t round);
uint64_t wsync_plan_ring_nbytes(const wsync_plan_t *plan, uint32_t worker);
/* Largest staging that any round needs on this rank. */
uint64_t wsync_plan_send_nbytes(const wsync_plan_t *plan);
uint64_t wsync_plan_recv_nbytes(const wsync_plan_t *plan);
/* What the worker will find in its ring, as a layout (owned by the caller): rank 0, buffer
 * = round, offset = bytes from the start of the ring, boxes without gaps, in the order of
 * dimensions in which the worker keeps them, at 64-byte aligned starts, dtype = the dtype
 * that is delivered.  Zero-size tensors of a whole destination appear as tensors without
 * shards. */
wsync_status_t wsync_plan_manifest(const wsync_plan_t *plan, uint32_t worker,
                                   wsync_layout_t **manifest, wsync_error_t *err);
wsync_plan_stats_t wsync_plan_stats(const wsync_plan_t *plan);
/* Indices of the source's tensors that no worker reads, ascending; empty ones are not
 * among them. */
const uint32_t *wsync_plan_unused(const wsync_plan_t *plan, size_t *count);
/* The same on all ranks of one specification, whatever spec.rank was. */
uint64_t wsync_plan_fingerprint(const wsync_plan_t *plan);

#endif
