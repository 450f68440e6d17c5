/* SPDX-License-Identifier: Apache-2.0
 * The frames of an exchange, and its state. */
#ifndef WSYNC_COMM_COMM_INTERNAL_H
#define WSYNC_COMM_COMM_INTERNAL_H

#include "comm/comm.h"
#include "ipc/link.h"

enum {
    COMM_WELCOME = 2,  /* rank, half_nbytes; staging, control: the answer to HELLO */
    COMM_READY = 3,    /* value that the sender's ready word will reach */
    COMM_RELEASED = 4, /* the same of its released word */
    COMM_BYE = 5,      /* the end of the connection that follows is no failure */
};

/* HELLO's arguments: rank, half_nbytes, rank_count, this word ("shared"). */
#define COMM_PURPOSE UINT64_C(0x646572616873)

/* Words of a control page, which only its owner writes. */
typedef enum comm_word {
    COMM_WORD_READY,    /* rounds that the owner has packed */
    COMM_WORD_RELEASED, /* rounds that the owner has read */
    COMM_WORD_COUNT,
} comm_word_t;

typedef struct comm_peer {
    wsync_link_t link; /* no channel: not connected yet, gone, or this rank itself */
    wsync_comm_t *comm;
    wsync_memory_t *staging;
    uint64_t half_nbytes;
    uint64_t announced[COMM_WORD_COUNT];
    bool marked;     /* scratch */
    bool readers[2]; /* it reads what was last posted in this half */
} comm_peer_t;

struct wsync_comm {
    const wsync_device_t *device;
    wsync_listener_t *listener; /* NULL once everybody is connected */
    wsync_memory_t *staging;
    wsync_memory_t *control;
    comm_peer_t *peers;                 /* rank_count */
    struct pollfd *polled;              /* rank_count; scratch */
    uint64_t posted[2];                 /* in each half: the sequence number */
    uint64_t recorded[COMM_WORD_COUNT]; /* what streams were told to record */
    const wsync_plan_t *plan;           /* borrowed; NULL before begin */
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
    wsync_ending_t ending;
    uint8_t token[WSYNC_TOKEN_NBYTES];
    char address[WSYNC_ADDRESS_NBYTES];
};

#endif
