/* SPDX-License-Identifier: Apache-2.0
 * The frames of an exchange between ranks of one host, and its state. */
#ifndef WSYNC_COMM_SAME_HOST_INTERNAL_H
#define WSYNC_COMM_SAME_HOST_INTERNAL_H

#include "comm/comm_internal.h"

/* Frames of the connection of two ranks. */
enum {
    SHARED_WELCOME = 2,  /* rank, half_nbytes; staging, control: the answer to HELLO */
    SHARED_READY = 3,    /* value that the sender's ready word will reach */
    SHARED_RELEASED = 4, /* the same of its released word */
    SHARED_BYE = 5,      /* the end of the connection that follows is no failure */
};

/* HELLO's arguments: rank, half_nbytes, rank_count, this word ("shared"). */
#define SHARED_PURPOSE UINT64_C(0x646572616873)

/* Words of a control page, which only its owner writes. */
typedef enum shared_word {
    SHARED_WORD_READY,    /* rounds that the owner has packed */
    SHARED_WORD_RELEASED, /* rounds that the owner has read */
    SHARED_WORD_COUNT,
} shared_word_t;

typedef struct shared_peer {
    wsync_link_t link; /* no channel: not connected yet, gone, or this rank itself */
    struct shared *shared;
    wsync_memory_t *staging;
    uint64_t half_nbytes;
    uint64_t announced[SHARED_WORD_COUNT];
    bool marked;     /* scratch */
    bool readers[2]; /* it reads what was last posted in this half */
} shared_peer_t;

typedef struct shared {
    wsync_comm_t base;
    wsync_listener_t *listener; /* NULL once everybody is connected */
    wsync_memory_t *staging;
    wsync_memory_t *control;
    shared_peer_t *peers;                 /* rank_count */
    struct pollfd *polled;                /* rank_count; scratch */
    uint64_t posted[2];                   /* in each half: the sequence number */
    uint64_t recorded[SHARED_WORD_COUNT]; /* what streams were told to record */
    uint64_t half_nbytes;
    uint8_t token[WSYNC_TOKEN_NBYTES];
} shared_t;

#endif
