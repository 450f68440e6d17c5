/* SPDX-License-Identifier: Apache-2.0
 * A communicator of NCCL, and the thread that makes every call for it: NCCL allows no two
 * calls at once.  Groups of transfers run in order on a stream of the communicator's own.
 * Events say when a group may begin and when its bytes have moved, so that nobody waits for
 * them on the host.
 *
 * A group that fails or takes too long ends the communicator: it is aborted, and no kernel
 * of it runs on.  The event of such a group may come all the same, so whoever has waited
 * for it asks wsync_nccl_communicator_check before the bytes count. */
#ifndef WSYNC_COMM_NCCL_COMMUNICATOR_H
#define WSYNC_COMM_NCCL_COMMUNICATOR_H

#include "comm/nccl_library.h"
#include "device/device.h"

typedef enum wsync_nccl_way {
    WSYNC_NCCL_SEND,
    WSYNC_NCCL_RECEIVE,
    WSYNC_NCCL_BROADCAST, /* among all ranks */
} wsync_nccl_way_t;

typedef struct wsync_nccl_transfer {
    wsync_nccl_way_t way;
    uint32_t peer; /* of a broadcast its root */
    void *data;    /* memory of the device */
    uint64_t nbytes;
} wsync_nccl_transfer_t;

/* A value that an event has to reach. */
typedef struct wsync_nccl_point {
    wsync_event_t event; /* memory NULL: there is nothing to wait for */
    uint64_t value;
} wsync_nccl_point_t;

enum {
    WSYNC_NCCL_MAX_BEGINS = 2,
    WSYNC_NCCL_MAX_GROUPS = 16, /* that were submitted and have not moved */
};

/* Transfers that need each other, so that they are begun together. */
typedef struct wsync_nccl_group {
    const wsync_nccl_transfer_t *transfers;
    size_t count;
    wsync_nccl_point_t begins[WSYNC_NCCL_MAX_BEGINS];
    wsync_nccl_point_t end; /* what is recorded */
    uint32_t round;         /* for messages */
} wsync_nccl_group_t;

typedef struct wsync_nccl_communicator wsync_nccl_communicator_t;

/* Begins to make the communicator; `id` is the same on all ranks, and used once.  NCCL may
 * take timeout_ms to take a group, and that may take as long from when it can begin. */
wsync_status_t wsync_nccl_communicator_create(const wsync_nccl_library_t *library,
                                              const wsync_device_t *device,
                                              const wsync_nccl_id_t *id, uint32_t rank,
                                              uint32_t rank_count, int timeout_ms,
                                              wsync_nccl_communicator_t **communicator,
                                              wsync_error_t *err);
/* Waits until all ranks have met.  TIMEOUT; can be repeated. */
wsync_status_t wsync_nccl_communicator_meet(wsync_nccl_communicator_t *communicator,
                                            int64_t deadline_ms, wsync_error_t *err);
/* Has the thread begin a group, which is copied, after those that it was given before.
 * STATE: as many as there may be have not moved. */
wsync_status_t wsync_nccl_communicator_submit(wsync_nccl_communicator_t *communicator,
                                              const wsync_nccl_group_t *group,
                                              wsync_error_t *err);
/* Waits until NCCL has taken the group of a round, if there is one: a stream that waited
 * for its end before that could share a queue of the device with it, and block it for ever.
 */
wsync_status_t wsync_nccl_communicator_begun(wsync_nccl_communicator_t *communicator,
                                             uint32_t round, int64_t deadline_ms,
                                             wsync_error_t *err);
/* What the thread has failed with, if it has: CLOSED or DEVICE, with the round and its
 * ranks. */
wsync_status_t wsync_nccl_communicator_check(wsync_nccl_communicator_t *communicator,
                                             wsync_error_t *err);
/* Aborts what is under way.  Other ranks see that as a failure, if they need this one. */
void wsync_nccl_communicator_close(wsync_nccl_communicator_t *communicator);
/* Closes.  False if NCCL or the device has hung: the memory of transfers has to stay. */
bool wsync_nccl_communicator_destroy(wsync_nccl_communicator_t *communicator);

#endif
