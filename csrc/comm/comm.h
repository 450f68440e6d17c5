/* SPDX-License-Identifier: Apache-2.0
 * Exchange of a plan's messages between its ranks, one step per round.  Each rank has
 * staging: two halves, one per round parity, each as large as the largest round.  Calls of
 * one rank, for every round in order:
 *
 *   acquire k   the send staging of round k may be written: its readers are done
 *   spans k     where the round's messages are packed to and unpacked from
 *   post k      what this rank packed is on its way once `stream` gets here
 *   wait k      what the others sent to this rank in round k can be read by what `stream`
 *               is given next (NCCL makes the stream wait; on one host this call waits)
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

struct wsync_nccl_library;

typedef struct wsync_comm wsync_comm_t;

/* Ranks of one host.  Staging is shared memory for what a rank sends, which the others map
 * and read where it lies.  Begins to listen; connect comes next, when the caller has
 * exchanged the addresses.  staging_nbytes is the size of one half; rounded up to whole
 * pages. */
wsync_status_t wsync_comm_create_shared(const wsync_device_t *device, const char *parent,
                                        uint32_t rank, uint32_t rank_count,
                                        uint64_t staging_nbytes, wsync_comm_t **comm,
                                        wsync_error_t *err);
/* Ranks with a GPU each, whose bytes move by NCCL between memory of the GPUs, ordered by
 * streams: the host waits for nothing, but that less than eight rounds are under way.  The
 * sizes are of one half of what a rank sends, and receives, in a round.  A round may take
 * timeout_ms from when this rank has packed it, and NCCL as long to begin it.  After a
 * stream that waits here was abandoned, the exchange can only be closed.
 *
 * INVALID: the host as the device.  connect refuses ranks of other versions of NCCL and
 * ranks that share a GPU (UNSUPPORTED), and names both. */
wsync_status_t wsync_comm_create_nccl(const struct wsync_nccl_library *library,
                                      const wsync_device_t *device, uint32_t rank,
                                      uint32_t rank_count, uint64_t send_nbytes,
                                      uint64_t recv_nbytes, int timeout_ms,
                                      wsync_comm_t **comm, wsync_error_t *err);

enum { WSYNC_COMM_ADDRESS_NBYTES = 512 };

/* What wsync_comm_address will be of such an exchange on a rank other than 0, which can say
 * it before there is a plan. */
void wsync_comm_nccl_address(const struct wsync_nccl_library *library,
                             const wsync_device_t *device,
                             char address[WSYNC_COMM_ADDRESS_NBYTES]);
/* Text to hand to all ranks; borrowed. */
const char *wsync_comm_address(const wsync_comm_t *comm);
/* Bytes of this rank's own staging, both halves. */
uint64_t wsync_comm_nbytes(const wsync_comm_t *comm);
/* Meets the other ranks; addresses[i] is rank i's.  TIMEOUT names the ranks that are
 * missing, and the call can be repeated with the same addresses. */
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
wsync_status_t wsync_comm_wait(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                               int timeout_ms, wsync_error_t *err);
wsync_status_t wsync_comm_release(wsync_comm_t *comm, uint32_t round,
                                  wsync_stream_t *stream, wsync_error_t *err);
/* What has gone wrong by itself since the last call; does not wait.  Once a stream has
 * passed all of an update's rounds, the bytes received are valid only if this is then OK on
 * every rank: a rank that gives up may release a round that it has not packed. */
wsync_status_t wsync_comm_check(wsync_comm_t *comm, wsync_error_t *err);
/* Gives back, until the next begin, staging that no other rank maps.  STATE while an update
 * is under way.  No stream may use it any more. */
wsync_status_t wsync_comm_park(wsync_comm_t *comm, wsync_error_t *err);
/* Leaves the others, who see an end in the middle of an update as CLOSED.  Spans stay
 * readable and writable for streams that still run; only destroy may follow. */
void wsync_comm_close(wsync_comm_t *comm);
void wsync_comm_destroy(wsync_comm_t *comm); /* closes; NULL is a no-op */

#endif
