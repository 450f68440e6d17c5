/* SPDX-License-Identifier: Apache-2.0
 * Exchange of a plan's messages between the trainer ranks of one host, one step per round.
 * Every rank's send staging (two halves, one per round parity, each as large as the largest
 * round it sends) is shared memory that the others map and read; nothing is received into
 * staging of its own.  Calls of one rank, for every round in order:
 *
 *   acquire k   the send staging of round k may be written: who read this half is done
 *   spans k     where the round's messages are packed to and unpacked from
 *   post k      what this rank packed is on its way once `stream` gets here
 *   wait k      what the others sent to this rank in round k can be read
 *   release k   this rank has read it once `stream` gets here
 *
 * acquire(k + 1), spans(k + 1) and post(k + 1) may come before wait(k).  All rounds are
 * posted on one stream and released on one stream.  Waits end with TIMEOUT and can be
 * repeated; CLOSED says which rank is gone.  A call out of order is STATE and changes
 * nothing, and so is a stream of another device, which is INVALID; after any other error
 * the exchange can only be closed and destroyed.  One thread at a time. */
#ifndef WSYNC_COMM_COMM_H
#define WSYNC_COMM_COMM_H

#include "core/plan/plan.h"
#include "device/device.h"

typedef struct wsync_comm wsync_comm_t;

/* Begins to listen; connect comes next, when the caller has exchanged the addresses.
 * staging_nbytes is the size of one half; rounded up to whole pages. */
wsync_status_t wsync_comm_create(const wsync_device_t *device, const char *parent,
                                 uint32_t rank, uint32_t rank_count,
                                 uint64_t staging_nbytes, wsync_comm_t **comm,
                                 wsync_error_t *err);
/* Text to hand to all ranks (path and token); borrowed. */
const char *wsync_comm_address(const wsync_comm_t *comm);
/* Bytes of this rank's own staging, both halves. */
uint64_t wsync_comm_nbytes(const wsync_comm_t *comm);
/* Connects to the ranks below, accepts the ranks above; addresses[i] is rank i's.  TIMEOUT
 * names the ranks that are missing, and the call can be repeated. */
wsync_status_t wsync_comm_connect(wsync_comm_t *comm, const char *const *addresses,
                                  int timeout_ms, wsync_error_t *err);

/* Starts an update with a plan (borrowed until the next begin or close).  INVALID names
 * both sizes if the plan's staging does not fit, STATE if the last update has not ended. */
wsync_status_t wsync_comm_begin(wsync_comm_t *comm, const wsync_plan_t *plan,
                                wsync_error_t *err);
wsync_status_t wsync_comm_acquire(wsync_comm_t *comm, uint32_t round, int timeout_ms,
                                  wsync_error_t *err);
/* Fills one span per message of the round, in the plan's order; borrowed memory, valid
 * until acquire of round + 2. */
wsync_status_t wsync_comm_spans(wsync_comm_t *comm, uint32_t round, wsync_span_t *spans,
                                size_t count, wsync_error_t *err);
wsync_status_t wsync_comm_post(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                               wsync_error_t *err);
wsync_status_t wsync_comm_wait(wsync_comm_t *comm, uint32_t round, int timeout_ms,
                               wsync_error_t *err);
wsync_status_t wsync_comm_release(wsync_comm_t *comm, uint32_t round,
                                  wsync_stream_t *stream, wsync_error_t *err);
/* Leaves the others, who see an end in the middle of an update as CLOSED.  Spans stay
 * readable and writable for streams that still run; only destroy may follow. */
void wsync_comm_close(wsync_comm_t *comm);
void wsync_comm_destroy(wsync_comm_t *comm); /* closes; NULL is a no-op */

#endif
