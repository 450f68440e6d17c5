/* SPDX-License-Identifier: Apache-2.0
 * Preloaded by tests/test_faults.py: allocations and system calls that the extension makes
 * fail on demand.  Who calls is told by the return address. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

static uintptr_t begin; /* of the extension's code */
static uintptr_t end;
static long left = -1;
static int code;
static const char *struck;
static uintptr_t place; /* in the extension's code, of the call that failed */

void faults_place(uintptr_t first, uintptr_t last)
{
    begin = first;
    end = last;
}

void faults_arm(long calls, int error)
{
    struck = NULL;
    code = error;
    __atomic_store_n(&left, calls, __ATOMIC_SEQ_CST);
}

/* The call that failed, or NULL; none fails from now on. */
const char *faults_disarm(void)
{
    __atomic_store_n(&left, -1, __ATOMIC_SEQ_CST);
    return struck;
}

uintptr_t faults_struck_at(void)
{
    return place;
}

static int strikes(const char *name, const void *caller)
{
    if ((uintptr_t)caller < begin || (uintptr_t)caller >= end ||
        __atomic_load_n(&left, __ATOMIC_SEQ_CST) < 0 ||
        __atomic_fetch_sub(&left, 1, __ATOMIC_SEQ_CST) != 0) {
        return 0;
    }
    struck = name;
    place = (uintptr_t)caller - begin;
    errno = code;
    return 1;
}

void *__libc_malloc(size_t nbytes);
void *__libc_calloc(size_t count, size_t nbytes);
void *__libc_realloc(void *memory, size_t nbytes);

void *malloc(size_t nbytes)
{
    return strikes("malloc", __builtin_return_address(0)) ? NULL : __libc_malloc(nbytes);
}

void *calloc(size_t count, size_t nbytes)
{
    return strikes("calloc", __builtin_return_address(0)) ? NULL
                                                          : __libc_calloc(count, nbytes);
}

void *realloc(void *memory, size_t nbytes)
{
    return strikes("realloc", __builtin_return_address(0)) ? NULL
                                                           : __libc_realloc(memory, nbytes);
}

/* Up to six words as the calling convention passes them, whatever their types are. */
#define FAULTY(name)                                             \
    long name(long a, long b, long c, long d, long e, long f)    \
    {                                                            \
        static long (*real)(long, long, long, long, long, long); \
                                                                 \
        if (strikes(#name, __builtin_return_address(0))) {       \
            return -1;                                           \
        }                                                        \
        if (real == NULL) {                                      \
            *(void **)&real = dlsym(RTLD_NEXT, #name);           \
        }                                                        \
        return real(a, b, c, d, e, f);                           \
    }

FAULTY(socket)
FAULTY(bind)
FAULTY(listen)
FAULTY(accept4)
FAULTY(connect)
FAULTY(getsockopt)
FAULTY(sendmsg)
FAULTY(recvmsg)
FAULTY(memfd_create)
FAULTY(ftruncate)
FAULTY(fallocate)
FAULTY(fcntl)
FAULTY(fstat)
FAULTY(madvise)
FAULTY(mmap)
FAULTY(poll)

/* Returns its error. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                   void *(*start)(void *), void *argument)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

    if (strikes("pthread_create", __builtin_return_address(0))) {
        return code;
    }
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    }
    return real(thread, attributes, start, argument);
}
