/* SPDX-License-Identifier: Apache-2.0
 * Turns of processes at a device of the stand-in driver: one has it at a time, for a slice,
 * and a stream that waits gives it back or not. */
#include <stdatomic.h>
#include <sys/mman.h>

#include "cuda_fixture.h"

enum { NBYTES = 4096, SWITCHES = 20, STEP_US = 50, LOOKS = 100 };

#define FOR_EVER "3600000000"

/* What both processes see. */
typedef struct view {
    uint64_t begun; /* the peer's stream has its turn */
    uint64_t gate;  /* what it waits for then */
    atomic_int inside;
    atomic_int last; /* process, by its number, 0 or 1 */
    atomic_int switches;
    atomic_int overlaps;
} view_t;

static view_t *view;

static void share(const char *slice_us, const char *holds)
{
    const int fd = memfd_create("board", MFD_CLOEXEC);
    char path[64];

    CHECK(fd >= 0);
    (void)snprintf(path, sizeof(path), "/proc/%ld/fd/%d", (long)getpid(), fd);
    choose_fake("WSYNC_FAKE_CUDA_BOARD", path);
    choose_fake("WSYNC_FAKE_CUDA_SLICE_US", slice_us);
    choose_fake("WSYNC_FAKE_CUDA_HOLDS", holds);
    view = mmap(NULL, NBYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(view != MAP_FAILED);
}

static wsync_cu_stream_t make_stream(const wsync_cuda_driver_t *cu)
{
    wsync_cu_stream_t stream = NULL;

    CU(cu->stream_create(&stream, WSYNC_CU_STREAM_NON_BLOCKING));
    return stream;
}

/* Has its turn, and waits in it for the gate. */
static void waiter_main(int socket)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_ptr_t at = 0;

    CU(cu->host_register(view, NBYTES, WSYNC_CU_HOST_DEVICE_MAP));
    CU(cu->host_pointer(&at, view, 0));
    CU(cu->stream_write_value(stream, at + offsetof(view_t, begun), 1, 0));
    CU(cu->stream_wait_value(stream, at + offsetof(view_t, gate), 1, WSYNC_CU_WAIT_GEQ));
    CU(cu->stream_write_value(stream, at + offsetof(view_t, begun), 2, 0));
    while (__atomic_load_n(&view->begun, __ATOMIC_ACQUIRE) == 0) {
        (void)usleep(100);
    }
    nudge(socket);
    CU(cu->stream_synchronize(stream));
    CU(cu->host_unregister(view));
}

/* A stream with work that comes when the peer has its turn. */
static wsync_cu_stream_t begin(const wsync_cuda_driver_t *cu, peer_t peer)
{
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_ptr_t at = 0;

    CU(cu->mem_alloc(&at, NBYTES));
    await_nudge(peer.socket);
    CU(cu->memset_async(at, 1, NBYTES, stream));
    return stream;
}

static void open_gate(peer_t peer)
{
    CHECK_EQ(__atomic_load_n(&view->begun, __ATOMIC_ACQUIRE), 1);
    __atomic_store_n(&view->gate, 1, __ATOMIC_RELEASE);
    peer_end(peer);
    CHECK_EQ(__atomic_load_n(&view->begun, __ATOMIC_ACQUIRE), 2);
}

TEST(a_wait_that_keeps_its_turn_keeps_others_from_the_device)
{
    peer_t peer;
    const wsync_cuda_driver_t *cu;
    wsync_cu_stream_t stream;

    share(FOR_EVER, "1");
    peer = peer_start(waiter_main);
    cu = enter_device(0);
    stream = begin(cu, peer);
    for (int i = 0; i < LOOKS; i++) {
        (void)usleep(1000);
        CHECK_EQ(cu->stream_query(stream), WSYNC_CU_NOT_READY);
    }
    open_gate(peer);
    CU(cu->stream_synchronize(stream));
}

TEST(a_wait_that_gives_its_turn_back_keeps_nobody)
{
    peer_t peer;
    const wsync_cuda_driver_t *cu;

    share(FOR_EVER, "0");
    peer = peer_start(waiter_main);
    cu = enter_device(0);
    CU(cu->stream_synchronize(begin(cu, peer)));
    open_gate(peer);
}

TEST(a_turn_that_is_kept_ends_with_its_slice)
{
    peer_t peer;
    const wsync_cuda_driver_t *cu;

    share("500", "1");
    peer = peer_start(waiter_main);
    cu = enter_device(0);
    CU(cu->stream_synchronize(begin(cu, peer)));
    open_gate(peer);
}

TEST(a_process_that_was_killed_keeps_nobody)
{
    peer_t peer;
    const wsync_cuda_driver_t *cu;
    wsync_cu_stream_t stream;

    share(FOR_EVER, "1");
    peer = peer_start(waiter_main);
    cu = enter_device(0);
    stream = begin(cu, peer);
    CHECK_EQ(kill(peer.pid, SIGKILL), 0);
    CU(cu->stream_synchronize(stream)); /* before anybody waits for the process */
    CHECK_EQ(waitpid(peer.pid, NULL, 0), peer.pid);
}

/* The work of a real one would go on. */
TEST(a_process_that_is_stopped_keeps_nobody)
{
    peer_t peer;
    const wsync_cuda_driver_t *cu;
    wsync_cu_stream_t stream;

    share(FOR_EVER, "1");
    peer = peer_start(waiter_main);
    cu = enter_device(0);
    stream = begin(cu, peer);
    CHECK_EQ(kill(peer.pid, SIGSTOP), 0);
    CU(cu->stream_synchronize(stream));
    CHECK_EQ(kill(peer.pid, SIGCONT), 0);
    open_gate(peer);
}

static void pause_shortly(void *argument)
{
    (void)argument;
    (void)usleep(20000);
}

/* Is idle, once a host function has run behind its last work. */
static void idle_main(int socket)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_ptr_t at = 0;

    CU(cu->mem_alloc(&at, NBYTES));
    CU(cu->launch_host(stream, pause_shortly, NULL)); /* what follows is queued by then */
    CU(cu->memset_async(at, 1, NBYTES, stream));
    CU(cu->launch_host(stream, pause_shortly, NULL));
    CU(cu->stream_synchronize(stream));
    nudge(socket);
    await_nudge(socket);
}

TEST(a_process_without_work_for_the_device_keeps_nobody)
{
    peer_t peer;
    const wsync_cuda_driver_t *cu;

    share(FOR_EVER, "0");
    peer = peer_start(idle_main);
    cu = enter_device(0);
    CU(cu->stream_synchronize(begin(cu, peer)));
    nudge(peer.socket);
    peer_end(peer);
}

/* --- slices of work ---------------------------------------------------------------------
 */

/* Part of a kernel that runs until the processes have taken turns often enough. */
static bool step(void *argument)
{
    const int number = *(const int *)argument;

    if (atomic_fetch_add(&view->inside, 1) > 0) {
        (void)atomic_fetch_add(&view->overlaps, 1);
    }
    if (atomic_exchange(&view->last, number) != number) {
        (void)atomic_fetch_add(&view->switches, 1);
    }
    (void)usleep(STEP_US);
    (void)atomic_fetch_sub(&view->inside, 1);
    return atomic_load(&view->switches) >= SWITCHES;
}

static void end_nothing(void *argument)
{
    (void)argument;
}

static void work(int number)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    const fakecuda_work_t kernel = {.step = step, .end = end_nothing, .argument = &number};
    wsync_cu_stream_t stream = make_stream(cu);
    void *address = fake_symbol(FAKECUDA_ENQUEUE);
    fakecuda_enqueue_func_t enqueue;

    memcpy(&enqueue, &address, sizeof(enqueue));
    CU(enqueue(stream, &kernel));
    CU(cu->stream_synchronize(stream));
}

static void worker_main(int socket)
{
    (void)socket;
    work(1);
}

TEST(processes_take_turns_and_never_run_together)
{
    peer_t peer;

    share("300", "0");
    peer = peer_start(worker_main);
    work(0);
    peer_end(peer);
    CHECK(atomic_load(&view->switches) >= SWITCHES);
    CHECK_EQ(atomic_load(&view->overlaps), 0);
}
