/* SPDX-License-Identifier: Apache-2.0
 * What the files of the shared-memory exchange have in common. */
#ifndef WSYNC_COMM_SHARED_INTERNAL_H
#define WSYNC_COMM_SHARED_INTERNAL_H

#include "comm/comm.h"
#include "device/deadline.h"
#include "ipc/channel.h"

enum {
    SHARED_WELCOME = 2,  /* rank, half_nbytes; staging, control: the answer to HELLO */
    SHARED_READY = 3,    /* value that the sender's ready word will reach */
    SHARED_RELEASED = 4, /* the same of its released word */
    SHARED_BYE = 5,      /* the end of the connection that follows is no failure */
};

/* HELLO's arguments: rank, half_nbytes, rank_count, this word ("shared"). */
#define SHARED_PURPOSE UINT64_C(0x646572616873)

enum {
    SHARED_CONTROL_NBYTES = 4096,
    SHARED_PAGE_NBYTES = 4096,
    SHARED_SEND_MS = 1000, /* queues hold a few frames: they are never full for long */
    SHARED_SLICE_MS = 10,
};

/* Words of a control page, each on a cache line of its own; their owner alone writes them.
 */
typedef enum shared_word {
    SHARED_WORD_READY,    /* rounds that the owner has packed */
    SHARED_WORD_RELEASED, /* rounds that the owner has read */
    SHARED_WORD_COUNT,
} shared_word_t;

typedef struct shared_peer {
    wsync_channel_t *channel; /* NULL: not connected yet, gone, or this rank itself */
    wsync_memory_t *staging;
    wsync_memory_t *control;
    uint64_t half_nbytes;
    uint64_t announced[SHARED_WORD_COUNT];
    int pid;
    bool departed; /* it said BYE */
} shared_peer_t;

struct wsync_comm {
    const wsync_device_t *device;
    wsync_listener_t *listener; /* NULL once everybody is connected */
    wsync_memory_t *staging;
    wsync_memory_t *control;
    shared_peer_t *peers;  /* rank_count */
    struct pollfd *polled; /* rank_count; scratch */
    bool *marked;          /* rank_count; scratch */
    bool *readers[2];      /* rank_count; who reads what was last posted in a half */
    uint64_t posted[2];    /* its sequence number */
    uint64_t recorded[SHARED_WORD_COUNT]; /* what streams were told to record */
    const wsync_plan_t *plan;             /* borrowed; NULL before begin */
    uint64_t half_nbytes;
    uint64_t base; /* rounds of all earlier updates: the same on all ranks */
    uint32_t rank;
    uint32_t rank_count;
    uint32_t round_count;
    uint32_t next_acquire;
    uint32_t next_post;
    uint32_t next_wait;
    uint32_t next_release;
    bool connected;
    bool ended;
    char reason[WSYNC_ERROR_MESSAGE_NBYTES]; /* why, once ended */
    uint8_t token[WSYNC_TOKEN_NBYTES];
    char address[WSYNC_ADDRESS_NBYTES];
};

wsync_status_t wsync_shared_check(const wsync_comm_t *comm, wsync_error_t *err);
/* Notes the end unless `status` is OK or TIMEOUT; returns it. */
wsync_status_t wsync_shared_settle(wsync_comm_t *comm, wsync_status_t status,
                                   const wsync_error_t *err);
/* Puts "rank n (pid p)" before a message. */
wsync_status_t wsync_shared_name_rank(const wsync_comm_t *comm, uint32_t rank,
                                      wsync_status_t status, wsync_error_t *err);
wsync_event_t wsync_shared_event(wsync_memory_t *control, shared_word_t word);

/* Waits until a word of a peer has reached `value`, looking at all peers all the while. */
wsync_status_t wsync_shared_await(wsync_comm_t *comm, uint32_t rank, shared_word_t word,
                                  uint64_t value, int64_t deadline_ms, uint32_t round,
                                  wsync_error_t *err);
/* Takes what peers have sent.  CLOSED names a rank that is gone without BYE. */
wsync_status_t wsync_shared_poll(wsync_comm_t *comm, int timeout_ms, uint32_t round,
                                 wsync_error_t *err);
/* Records a word of this rank and announces it to the marked ranks, if there are any. */
wsync_status_t wsync_shared_announce(wsync_comm_t *comm, shared_word_t word, uint64_t value,
                                     wsync_stream_t *stream, uint32_t round,
                                     wsync_error_t *err);

#endif
