/* SPDX-License-Identifier: Apache-2.0
 * What tests ask of the stand-in for libcuda.so.1 (dlsym; the library is what
 * WSYNC_CUDA_LIB names).  Device memory is memfds, which the processor finds nothing of at
 * the device's addresses; the device has addresses of its own for registered memory of the
 * host; and streams are threads that take their time.  What the real driver leaves
 * undefined is refused, with a line in the log that says why.
 *
 * Environment, read by cuInit:
 *   WSYNC_FAKE_CUDA_VERSION   of CUDA that the driver speaks (12080)
 *   WSYNC_FAKE_CUDA_DEVICES   how many (1)
 *   WSYNC_FAKE_CUDA_FIRST     number of the first: what another process calls its n-th (0)
 *   WSYNC_FAKE_CUDA_MEMORY    bytes of each that a process has (1 GiB)
 *   WSYNC_FAKE_CUDA_DELAY_US  longest random pause before an operation of a stream (100)
 *   WSYNC_FAKE_CUDA_CONNECTIONS
 *                             N: streams of one priority, whoever made them, take turns at
 *                             so many queues, where what waits blocks what came later, as
 *                             with CUDA_DEVICE_MAX_CONNECTIONS=N (0: each has its own)
 *   WSYNC_FAKE_CUDA_PRIORITIES
 *                             1: streams have no priorities (0: six of them)
 *   WSYNC_FAKE_CUDA_LACKS     numbers of attributes of devices that are 0, between commas
 *   WSYNC_FAKE_CUDA_PEERS     0: no device reaches another one's memory (1)
 *   WSYNC_FAKE_CUDA_MPS       1: the process is a client of MPS, and opens IPC handles of
 *                             other clients alone, as others open those of others (0)
 *   WSYNC_FAKE_CUDA_PAGEABLE  1: the devices reach all memory of the host by themselves,
 *                             and it counts as the host's, of no allocation; 2: and move
 *                             its pages (0)
 *   WSYNC_FAKE_CUDA_RESERVED  1: reserved addresses without memory count as the device's;
 *                             0: the driver knows nothing of them (0)
 *   WSYNC_FAKE_CUDA_LOG       file that gets a line "PID CALL" per call
 *   WSYNC_FAKE_CUDA_MISUSE    file that gets a line "PID TEXT" per call that is refused for
 *                             what would come of it: use after free or destroy, a late call
 *   WSYNC_FAKE_CUDA_SIZES     1: and a line "PID size BYTES" per upload (0)
 *   WSYNC_FAKE_CUDA_FAIL      CALL:K:CODE: the K-th such call (from 0; "*": any) fails;
 *                             CALL:K:CODE:1: and so does every call after it
 *   WSYNC_FAKE_CUDA_FAULT     K:CODE: the K-th kernel that runs (from 0) faults, and every
 *                             call fails from then on
 */
#ifndef WSYNC_TESTS_FAKECUDA_H
#define WSYNC_TESTS_FAKECUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Objects of this process that have not been given back. */
typedef struct fakecuda_census {
    long physical; /* memory handles and what they stand for */
    long reserved;
    long mapped;
    long allocated; /* cuMemAlloc and opened handles */
    long registered;
    long pushed; /* contexts, by the calling thread */
} fakecuda_census_t;

typedef void (*fakecuda_census_func_t)(fakecuda_census_t *census);
/* Calls until one fails with `code`; negative: none does.  A call that gives something back
 * does so and fails all the same, as the driver's do with errors of earlier work. */
typedef void (*fakecuda_fail_func_t)(const char *call, long k, int code);
/* The same of a device that is lost with that call: every call fails from then on, with
 * nothing done, and streams run nothing any more. */
typedef void (*fakecuda_lose_func_t)(const char *call, long k, int code);
/* The call that was failed, or NULL. */
typedef const char *(*fakecuda_failed_func_t)(void);

/* Where the processor reads and writes what the device has at an address, until that is
 * given back; other addresses are the host's own. */
typedef void *(*fakecuda_reach_func_t)(const void *at);

/* Frees an allocation and makes another one at its address, as the driver may. */
typedef void (*fakecuda_replace_func_t)(const void *at);

/* --- for tests/fakenccl -----------------------------------------------------------------
 */

typedef struct fakecuda_span {
    uintptr_t at;
    size_t nbytes;
} fakecuda_span_t;

/* What a library does on a stream with kernels of its own. */
typedef struct fakecuda_work {
    /* Called again and again, by the stream's thread, until it says that all is done. */
    bool (*step)(void *argument);
    /* The last call, also of a device that was lost before. */
    void (*end)(void *argument);
    void *argument;
    const fakecuda_span_t *spans; /* of the device, that it touches; kept until `end` */
    size_t span_count;
} fakecuda_work_t;

/* SUCCESS, or why the driver does not take it: `end` is not called then.  No context needs
 * to be current. */
typedef int (*fakecuda_enqueue_func_t)(void *stream, const fakecuda_work_t *work);
/* The UUID (16 bytes) of the device whose context is current, or INVALID_CONTEXT. */
typedef int (*fakecuda_current_func_t)(uint8_t *uuid);

#define FAKECUDA_ENQUEUE "fakecuda_enqueue"
#define FAKECUDA_CURRENT "fakecuda_current"
#define FAKECUDA_REACH "fakecuda_reach"
#define FAKECUDA_CENSUS "fakecuda_census"
#define FAKECUDA_FAIL "fakecuda_fail"
#define FAKECUDA_LOSE "fakecuda_lose"
#define FAKECUDA_FAILED "fakecuda_failed"

#endif
