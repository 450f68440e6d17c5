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
    FAKE_PARAMETER_NBYTES = 256,
    FAKE_LACKS = 64,
    FAKE_PRIORITIES = 6,
    FAKE_KERNELS = 2,
    FAKE_SHARED_NBYTES = 48 * 1024, /* of a block, unless more is asked for before */
    FAKE_PEER_UNSUPPORTED = 217,    /* CUDA_ERROR_PEER_ACCESS_UNSUPPORTED */
};

struct wsync_cu_context {
    int device;
};

struct wsync_cu_event {
    struct wsync_cu_event *next;
    struct wsync_cu_context *context;
    unsigned flags;
    _Atomic uint64_t recorded;  /* records enqueued */
    _Atomic uint64_t completed; /* and passed */
    bool dead;                  /* destroyed; kept for pending operations */
    long pending;               /* operations that name it */
    uint64_t when;              /* ns, of the last record that passed */
};

typedef struct fake_physical {
    struct fake_physical *next;
    wsync_cu_handle_t handle;
    size_t nbytes;
    int fd;
    int device;
    int ordinal;  /* of the device in the process that made it */
    int types;    /* of the handles that it can be exported as */
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
    fake_physical_t *physical;        /* of a mapping */
    int fd;
    pid_t owner;                     /* of an opened handle */
    unsigned long long owner_buffer; /* its number there */
    long opens;
} fake_range_t;

typedef enum fake_op_kind {
    FAKE_COPY,
    FAKE_SET,
    FAKE_WRITE_VALUE,
    FAKE_WAIT_VALUE,
    FAKE_RECORD,
    FAKE_LAUNCH,
    FAKE_WORK,
} fake_op_kind_t;

typedef struct fake_kernel {
    const char *name;
    void (*run)(unsigned grid, unsigned block, const void *parameters);
    unsigned block; /* threads that its registers are enough for */
    size_t nbytes;  /* of its one parameter */
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
    size_t used[FAKE_MAX_DEVICES]; /* by this process */
    unsigned delay_us;
    bool pageable;
    bool moving;   /* and moves its pages to the device when that reads them */
    bool reserved; /* addresses without memory are the device's all the same */
    bool no_peers; /* no device reaches another's memory */
    bool mps;
    char lacks[FAKE_LACKS]; /* numbers of attributes, between commas */
    bool sizes;
    size_t connections; /* queues of a priority that streams share; 0: each has its own */
    int priorities;
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

/* Whether [at, at + nbytes) may be used by an operation of the device; with `by_host` also
 * what only the host reaches; locked. */
wsync_cu_result_t fake_check_range(const char *call, uintptr_t at, size_t nbytes,
                                   bool by_host);
/* Of what this process has not taken of a device; locked. */
size_t fake_free_nbytes(int device);
/* Adds to what this process has of a device; locked. */
void fake_charge(int device, size_t nbytes);
/* Addresses that nobody else has, at which there is nothing for the processor; 0: none. */
uintptr_t fake_reserve(size_t nbytes);
/* Takes device memory away for ever. */
void fake_bury(fake_range_t *range);
/* Where a thread of the fake reads and writes what the device has at an address: other
 * addresses are the host's own.  Locked. */
void *fake_reach(uintptr_t at);
EXPORT void *fakecuda_reach(const void *at); /* not locked */
EXPORT void fakecuda_replace(const void *at);
/* Whether an operation that has not ended, of those that are no launch of a kernel, names
 * the range; locked. */
bool fake_range_busy(uintptr_t at, size_t nbytes);
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
