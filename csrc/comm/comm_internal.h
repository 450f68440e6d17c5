/* SPDX-License-Identifier: Apache-2.0
 * What all exchanges have: the order of their calls, and what a backend does in them. */
#ifndef WSYNC_COMM_COMM_INTERNAL_H
#define WSYNC_COMM_COMM_INTERNAL_H

#include "comm/comm.h"
#include "ipc/link.h"

/* Arguments have been checked, and rounds are the next ones.  After an error of any of
 * these but TIMEOUT the exchange has ended. */
typedef struct wsync_comm_ops {
    wsync_status_t (*connect)(wsync_comm_t *comm, const char *const *addresses,
                              int64_t deadline_ms, wsync_error_t *err);
    /* Bytes of a half of the staging in which messages of a rank lie, and where in it. */
    uint64_t (*half_nbytes)(const wsync_comm_t *comm, uint32_t source);
    uint64_t (*offset)(const wsync_comm_t *comm, const wsync_message_t *message);
    wsync_status_t (*acquire)(wsync_comm_t *comm, uint32_t round, int64_t deadline_ms,
                              wsync_error_t *err);
    /* Where a message of the round lies. */
    void *(*place)(const wsync_comm_t *comm, uint32_t round,
                   const wsync_message_t *message);
    wsync_status_t (*post)(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                           wsync_error_t *err);
    wsync_status_t (*wait)(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                           int64_t deadline_ms, wsync_error_t *err);
    wsync_status_t (*release)(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                              wsync_error_t *err);
    /* The rest is NULL where there is nothing to do. */
    wsync_status_t (*check)(wsync_comm_t *comm, wsync_error_t *err);
    wsync_status_t (*park)(wsync_comm_t *comm, wsync_error_t *err);
    wsync_status_t (*unpark)(wsync_comm_t *comm, wsync_error_t *err);
    /* `orderly`: between updates. */
    void (*close)(wsync_comm_t *comm, bool orderly);
    void (*destroy)(wsync_comm_t *comm); /* frees, after close */
} wsync_comm_ops_t;

/* A backend's record begins with this. */
struct wsync_comm {
    const wsync_comm_ops_t *ops;
    const wsync_device_t *device;
    const wsync_plan_t *plan; /* borrowed; NULL before begin */
    uint64_t nbytes;          /* of all staging */
    uint64_t base;            /* rounds of all earlier updates: the same on all ranks */
    uint32_t rank;
    uint32_t rank_count;
    uint32_t round_count;
    uint32_t next_acquire;
    uint32_t next_post;
    uint32_t next_wait;
    uint32_t next_release;
    bool connected;
    bool parked;
    wsync_ending_t ending;
    char address[WSYNC_COMM_ADDRESS_NBYTES];
};

/* Begins a record that is all 0.  INVALID: a rank that is none, or absurd staging. */
wsync_status_t wsync_comm_init(wsync_comm_t *comm, const wsync_comm_ops_t *ops,
                               const wsync_device_t *device, uint32_t rank,
                               uint32_t rank_count, uint64_t staging_nbytes,
                               wsync_error_t *err);

/* Round k of an update has the sequence number base + k + 1, which all ranks count alike;
 * its parity picks the half of the staging. */
static inline uint64_t wsync_comm_sequence(const wsync_comm_t *comm, uint32_t round)
{
    return comm->base + (uint64_t)round + 1;
}

#endif
