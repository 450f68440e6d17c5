/* SPDX-License-Identifier: Apache-2.0
 * Inside of the stand-in: one lock over all tables. */
#ifndef WSYNC_TESTS_FAKE_H
#define WSYNC_TESTS_FAKE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "device/cuda_driver.h"
#include "fakecuda.h"

enum {
    FAKE_MAX_DEVICES = 16,
    FAKE_GRANULARITY = 2 * 1024 * 1024,
    FAKE_MAX_USERS = 16,
    FAKE_MAX_PARAMETERS = 8,
    FAKE_PARAMETER_NBYTES = 256,
    FAKE_LACKS = 64,
    FAKE_PRIORITIES = 6,
    FAKE_KERNELS = 2,
    FAKE_SHARED_NBYTES = 48 * 1024, /* of a block, unless more is asked for before */
    FAKE_OUT_OF_RESOURCES = 701,    /* CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES */
    FAKE_PEER_UNSUPPORTED = 217,    /* CUDA_ERROR_PEER_ACCESS_UNSUPPORTED */
};

struct wsync_cu_context {
    int device;
    long retained;
};

/* Who in other processes has something open, in memory that they all map. */
typedef struct fake_shared {
    atomic_uint magic;
    atomic_int users[FAKE_MAX_USERS]; /* pids */
    atomic_bool gone;                 /* its owner gave it up */
} fake_shared_t;

struct wsync_cu_event {
    struct wsync_cu_event *next;
    struct wsync_cu_context *context;
    unsigned flags;
    _Atomic uint64_t recorded;  /* records enqueued */
    _Atomic uint64_t completed; /* and passed */
    bool dead;                  /* destroyed; kept for pending operations */
    long pending;               /* operations that name it */
    uint64_t when;              /* ns, of the last record that passed */
    uint64_t captured; /* of a record of the context: what came before this number */
};

typedef struct fake_physical {
    struct fake_physical *next;
    wsync_cu_handle_t handle;
    size_t nbytes;
    int fd;
    int device;
    int ordinal;  /* of the device in the process that made it */
    long handles; /* references: create, import */
    long maps;
    bool charged; /* its bytes count as this process's */
} fake_physical_t;

typedef enum fake_kind {
    FAKE_RESERVED,
    FAKE_MAPPED,
    FAKE_ALLOCATED, /* cuMemAlloc */
    FAKE_OPENED,    /* cuIpcOpenMemHandle */
    FAKE_HOST,      /* cuMemHostRegister; `host` is the caller's */
    FAKE_GRAVE,     /* was one of these: its addresses are not used again */
} fake_kind_t;

typedef struct fake_range {
    struct fake_range *next;
    fake_kind_t kind;
    unsigned long long buffer; /* a number of its own */
    uintptr_t at;              /* for the device */
    size_t nbytes;
    unsigned char *host; /* where threads of the fake reach it, or NULL: nowhere */
    unsigned char *room; /* of a reservation: where they will reach what is mapped in it */
    struct wsync_cu_context *context; /* of an allocation */
    int device;                       /* of a mapping; -1: no access */
    fake_physical_t *physical;        /* of a mapping */
    fake_shared_t *shared;            /* of an allocation */
    int fd;
    pid_t owner; /* of an opened handle */
    int owner_fd;
    long opens;
} fake_range_t;

typedef enum fake_op_kind {
    FAKE_COPY,
    FAKE_SET,
    FAKE_WRITE_VALUE,
    FAKE_WAIT_VALUE,
    FAKE_RECORD,
    FAKE_WAIT_EVENT,
    FAKE_LAUNCH,
    FAKE_WORK,
} fake_op_kind_t;

typedef void (*fake_kernel_func_t)(unsigned grid, unsigned block, void **parameters);
/* Of some bytes; anything but SUCCESS ends the visit. */
typedef wsync_cu_result_t (*fake_visit_func_t)(const void *state, uintptr_t at,
                                               size_t nbytes);

typedef struct fake_kernel {
    const char *name;
    fake_kernel_func_t run;
    /* Visits all that a launch touches; locked. */
    wsync_cu_result_t (*each)(const unsigned char *parameters, fake_visit_func_t visit,
                              const void *state);
    unsigned block; /* threads that its registers are enough for */
    int parameter_count;
    size_t parameter_nbytes[FAKE_MAX_PARAMETERS];
} fake_kernel_t;

typedef struct fake_op {
    struct fake_op *next;
    fake_op_kind_t kind;
    uintptr_t destination;
    uintptr_t source;
    size_t nbytes;
    uint64_t value; /* or the record of an event */
    struct wsync_cu_event *event;
    fakecuda_work_t work;
    const fake_kernel_t *kernel;
    unsigned grid;
    unsigned block;
    unsigned char parameters[FAKE_PARAMETER_NBYTES];
    uint64_t number; /* in the order of all streams */
    uint64_t after;  /* it waits for all of its context that came before this number */
} fake_op_t;

struct wsync_cu_stream {
    struct wsync_cu_stream *next;
    struct wsync_cu_context *context;
    pthread_cond_t changed;
    fake_op_t *head; /* the one that runs, until it is done */
    fake_op_t *tail;
    unsigned seed;
    bool running; /* the head, without the lock */
    bool destroyed;
    bool blocking;  /* the default stream waits for it */
    size_t length;  /* of the queue */
    size_t channel; /* of the device, that it shares with others of its priority */
    int priority;   /* 0, and below: sooner */
};

struct wsync_cu_function {
    const struct wsync_cu_module *module;
    const fake_kernel_t *kernel;
};

struct wsync_cu_module {
    struct wsync_cu_module *next;
    struct wsync_cu_context *context;
    struct wsync_cu_function functions[FAKE_KERNELS];
};

typedef struct fake_state {
    pthread_mutex_t mutex;
    pid_t pid; /* 0 before cuInit */
    int device_count;
    int first;
    atomic_int lost; /* the code of every call from then on */
    size_t memory;
    struct fake_board *board; /* shared with other processes, or not */
    struct fake_use *use;     /* this process's, on it */
    unsigned delay_us;
    bool pageable;
    bool moving;   /* and moves its pages to the device when that reads them */
    bool reserved; /* addresses without memory are the device's all the same */
    bool no_peers; /* no device reaches another's memory */
    bool mps;
    char lacks[FAKE_LACKS]; /* numbers of attributes, between commas */
    bool shown;             /* the processor reaches device memory where the device does */
    bool sizes;
    size_t connections; /* queues of a priority that streams share; 0: each has its own */
    int priorities;
    bool syncs;   /* calls that may wait for all that runs do */
    size_t queue; /* operations that a stream holds; 0: any number */
    uint64_t next_number;
    size_t next_channels[FAKE_PRIORITIES];
    unsigned seed;
    struct wsync_cu_context contexts[FAKE_MAX_DEVICES];
    fake_physical_t *physicals;
    fake_range_t *ranges;
    struct wsync_cu_stream *streams;
    struct wsync_cu_event *events;
    struct wsync_cu_module *modules;
    wsync_cu_handle_t next_handle;
    unsigned long long next_buffer;
} fake_state_t;

extern fake_state_t fake;

#define EXPORT __attribute__((visibility("default")))

/* What only tests call. */
#define FAKE_TESTS_MAP(X)                                                            \
    X(primary_release, cuDevicePrimaryCtxRelease, 11000, (wsync_cu_device_t device)) \
    X(memcpy_out_async, cuMemcpyDtoHAsync, 3020,                                     \
      (void *destination, wsync_cu_ptr_t source, size_t nbytes, wsync_cu_stream_t stream))

#define FAKE_DECLARE(member, symbol, version, parameters) \
    wsync_cu_result_t fake_##member parameters;
WSYNC_CUDA_MAP(FAKE_DECLARE)
WSYNC_CUDA_LATER_MAP(FAKE_DECLARE)
FAKE_TESTS_MAP(FAKE_DECLARE)
#undef FAKE_DECLARE

/* Whether an attribute of devices is 0 by the environment. */
bool fake_lacks(int attribute);
/* Of CUDA, that the driver speaks. */
int fake_version(void);
/* Every call begins here: log, planned failure, fork, initialisation. */
wsync_cu_result_t fake_enter(const char *call);
/* The same for calls that need a current context. */
wsync_cu_result_t fake_enter_context(const char *call, struct wsync_cu_context **context);
/* The same for calls that give something back: a planned failure comes out of fake_leave.
 */
/* Some of them need no context (NULL). */
wsync_cu_result_t fake_enter_return(const char *call, struct wsync_cu_context **context);
wsync_cu_result_t fake_leave(wsync_cu_result_t code);
/* Whether the kernel that is to run faults: then every call fails from now on. */
bool fake_launch_faults(void);
/* Logs why and gives the code back. */
wsync_cu_result_t fake_refuse(wsync_cu_result_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void fake_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fake_lock(void);
void fake_unlock(void);

/* A process that has ended, and that nobody has waited for yet, has nothing any more. */
bool fake_is_alive(pid_t pid);
/* A page of shared memory for open counts, in `fd` from `offset` on. */
fake_shared_t *fake_shared_map(int fd, off_t offset);
void fake_shared_unmap(fake_shared_t *shared);
bool fake_shared_join(fake_shared_t *shared);
void fake_shared_leave(fake_shared_t *shared);
/* A process that is alive and has it open, or 0. */
pid_t fake_shared_user(fake_shared_t *shared);
/* What /proc knows as descriptor `fd` of process `pid`, or -1; it must be a memfd `name`.
 */
int fake_steal(pid_t pid, int fd, const char *name);

/* Whether [at, at + nbytes) may be used by an operation of the device; with `by_host` also
 * what only the host reaches; locked. */
wsync_cu_result_t fake_check_range(const char *call, uintptr_t at, size_t nbytes,
                                   bool by_host);
/* Of all processes that share a board; locked. */
bool fake_board_open(const char *path);
size_t fake_free_nbytes(int device);
uint64_t fake_now_ns(void);
/* A moment, between two looks at something. */
void fake_pause(void);
/* Adds to what this process has of a device. */
void fake_charge(int device, size_t nbytes);
/* Addresses that nobody else has, at which there is nothing for the processor; 0: none. */
uintptr_t fake_reserve(size_t nbytes);
/* What its memory can be exported as, if it is a mapping; locked. */
int fake_handle_types(const fake_range_t *range);
/* Takes device memory away for ever. */
void fake_bury(fake_range_t *range);
/* Where a thread of the fake reads and writes what the device has at an address: other
 * addresses are the host's own.  Locked. */
void *fake_reach(uintptr_t at);
EXPORT void *fakecuda_reach(const void *at); /* not locked */
/* Whether an operation that has not ended names the range; locked. */
bool fake_range_busy(uintptr_t at, size_t nbytes);
/* Where the driver may wait for the device: until all streams have passed what they had. */
void fake_synchronize(void);
/* Every call fails from now on; returns when no stream runs anything any more. */
void fake_streams_lose(wsync_cu_result_t code);
/* INVALID_HANDLE unless it lives (and, if one is given, is of the context); locked. */
wsync_cu_result_t fake_event_check(const char *call, const struct wsync_cu_event *event,
                                   const struct wsync_cu_context *context);
/* Frees a destroyed event that nothing waits for; locked. */
void fake_event_let_go(struct wsync_cu_event *event);
/* The kernel of a launch, or why there is none; locked. */
wsync_cu_result_t fake_kernel_of(wsync_cu_function_t function,
                                 const struct wsync_cu_context *context,
                                 const fake_kernel_t **kernel);

#endif
