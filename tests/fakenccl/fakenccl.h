/* SPDX-License-Identifier: Apache-2.0
 * What tests ask of the stand-in for libnccl.so.2 (dlsym; the library is what
 * WSYNC_NCCL_LIB names).  Ranks are communicators of one process or of several on this
 * machine, which find each other's memory by the unique id.  GPUs are those of
 * tests/fakecuda, which must be loaded as the driver; a group is one piece of work on a
 * stream of theirs.
 *
 * What the real library demands or leaves undefined is refused, and a line in the log of
 * misuse says why:
 *   a call from a second thread, or while the communicator is in progress (but for
 *   ncclCommGetAsyncError and ncclCommAbort); a call on a communicator that was freed, or
 *   between the start and the end of another thread's group; a group of two communicators
 *   or two streams; memory that is no device's.  What wsync does not do is not there:
 *   communicators that block, operations outside of groups, other types than bytes.
 * A send takes its place only when the receive is there; if that has another size, or one
 * side is in a collective operation and the other is not, or in another one, both wait
 * until they are aborted.  So does a send to a rank that waits for another one first.
 * Equal GPUs and unequal versions are refused.
 * A communicator is in progress for some polls after its init and
 * after each group, whose work is on the stream only then.
 *
 * Environment, read as the library is loaded:
 *   WSYNC_FAKE_NCCL_VERSION  22907
 *   WSYNC_FAKE_CUDA_MISUSE   file that gets a line "PID TEXT" per misuse
 */
#ifndef WSYNC_TESTS_FAKENCCL_H
#define WSYNC_TESTS_FAKENCCL_H

/* Of this process, what has not been given back. */
typedef struct fakenccl_census {
    long communicators;
    long works;      /* groups on streams that have not ended */
    long received;   /* messages that have arrived by now */
    long operations; /* that have been asked for by now */
} fakenccl_census_t;

typedef void (*fakenccl_census_func_t)(fakenccl_census_t *census);

/* Operations (sends, receives, collectives) of the process are counted from 0 on.
 *   hang   operation K never ends
 *   error  operation K never ends, and the communicator has the asynchronous error VALUE
 *   never  no init completes
 *   owner  every call on a communicator is refused but from the thread that has made it
 * A negative K takes it back.  The last two want 0 as K. */
typedef void (*fakenccl_inject_func_t)(const char *what, long k, long value);

#define FAKENCCL_CENSUS "fakenccl_census"
#define FAKENCCL_INJECT "fakenccl_inject"

#endif
