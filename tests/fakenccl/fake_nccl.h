/* SPDX-License-Identifier: Apache-2.0
 * Inside of the stand-in: one lock over all communicators of the process.  Work on streams
 * takes no lock; it shares words with its communicator and with the other ranks. */
#ifndef WSYNC_TESTS_FAKE_NCCL_H
#define WSYNC_TESTS_FAKE_NCCL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../fakecuda/fakecuda.h"
#include "comm/nccl_library.h"
#include "fakenccl.h"

#define EXPORT __attribute__((visibility("default")))

enum { FAKE_MAX_RANKS = 16, FAKE_CHUNK_NBYTES = 64 * 1024, FAKE_UUID_NBYTES = 16 };

typedef enum fake_kind {
    FAKE_POINT_TO_POINT,
    FAKE_BROADCAST,
} fake_kind_t;

/* What a send says of itself before any of it is taken. */
typedef struct fake_offer {
    fake_kind_t kind;
    uint64_t collective; /* its number among the communicator's */
    uint64_t nbytes;
} fake_offer_t;

/* From one rank to another: one message at a time, one piece of it at a time. */
typedef struct fake_channel {
    _Atomic uint64_t offered; /* messages */
    _Atomic uint64_t taken;
    _Atomic uint64_t written; /* pieces */
    _Atomic uint64_t read;
    fake_offer_t offer;
    uint32_t piece_nbytes;
    unsigned char piece[FAKE_CHUNK_NBYTES];
} fake_channel_t;

typedef struct fake_member {
    atomic_bool joined;
    int version;
    uint8_t uuid[FAKE_UUID_NBYTES];
} fake_member_t;

/* What the ranks share. */
typedef struct fake_world {
    uint64_t nonce;
    fake_member_t members[FAKE_MAX_RANKS];
    fake_channel_t channels[FAKE_MAX_RANKS][FAKE_MAX_RANKS]; /* from, to */
} fake_world_t;

/* One side of one message. */
typedef struct fake_part {
    bool sends;
    bool begun; /* offered, or taken */
    bool over;
    bool stuck;
    int peer;
    unsigned char *data;
    uint64_t done;
    fake_offer_t offer;
    long operation; /* of the process */
} fake_part_t;

/* A group of one communicator, on its way to a stream or on it. */
typedef struct fake_work {
    struct wsync_nccl_comm *comm;
    wsync_cu_stream_t stream;
    fake_part_t *parts;
    fakecuda_span_t *spans;
    size_t part_count;
    size_t span_count;
    size_t capacity;
    uint64_t number; /* among the communicator's */
    long operation;  /* the last that was added */
    bool begun;
} fake_work_t;

struct wsync_nccl_comm {
    struct wsync_nccl_comm *next;
    fake_world_t *world;
    int fd; /* of the world, for ranks that have yet to join; -1 */
    int rank;
    int rank_count;
    bool ready; /* all ranks have joined */
    bool busy;  /* in progress */
    long polls; /* for which it is still in progress */
    bool freed;
    long owner;  /* thread that has made it */
    long holder; /* thread that has a group open, or is in a call; 0 */
    const char *call;
    fake_work_t *group; /* of the holder */
    uint64_t collectives;
    uint64_t submitted; /* works */
    _Atomic uint64_t begun;
    _Atomic uint64_t ended;
    atomic_bool stop; /* works end at once */
    atomic_int error;
    atomic_int users; /* itself, and its works */
};

/* --- settings.c: misuse, what is injected --- */

typedef struct fake_settings {
    atomic_int version;
    atomic_bool never;
    atomic_bool owner;
    atomic_long hang; /* operations; -1: none */
    atomic_long fails;
    atomic_int error;
} fake_settings_t;

extern fake_settings_t fake_settings;

void fake_lock(void);
void fake_unlock(void);
long fake_thread(void);
/* Is what ncclGetLastError says from then on; gives the result back. */
int fake_refuse(int result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same, with a line in the log of misuse. */
int fake_misuse(int result, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* --- comm.c --- */

typedef enum fake_use {
    FAKE_COMMUNICATE,
    FAKE_ASK, /* ncclCommGetAsyncError, ncclCommAbort */
} fake_use_t;

/* Whether this thread may make the call now; if so it holds the communicator.  Locked, and
 * remains so. */
int fake_hold(struct wsync_nccl_comm *comm, const char *call, fake_use_t use);
void fake_let_go(struct wsync_nccl_comm *comm);
/* The communicator is in progress from now on, which is what a call returns; locked. */
int fake_set_busy(struct wsync_nccl_comm *comm);
/* The result of ncclCommGetAsyncError, which the asking moves on; locked. */
int fake_progress(struct wsync_nccl_comm *comm);
/* One user less: the last one frees what the ranks share. */
void fake_drop(struct wsync_nccl_comm *comm);
/* The hooks of tests/fakecuda, or NULL. */
void *fake_driver_symbol(const char *name);
long fake_communicators(void);
long fake_works(void);

/* --- group.c --- */

/* Puts the communicator's group on its stream; locked. */
int fake_launch(struct wsync_nccl_comm *comm);
void fake_work_free(fake_work_t *work);
long fake_received(void);
long fake_operations(void);

#endif
