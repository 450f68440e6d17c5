/* SPDX-License-Identifier: Apache-2.0
 * The stand-in driver: what it does, and that it refuses what the real one leaves
 * undefined.  A test that passes on it means something only because of these. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>

#include "cuda_fixture.h"
#include "device/kernel_table.h"

enum { CHUNK = 2 * 1024 * 1024 };

static const wsync_cu_property_t exportable = {.type = WSYNC_CU_ALLOCATION_PINNED,
                                               .handle_types = WSYNC_CU_HANDLE_FD,
                                               .location = {WSYNC_CU_LOCATION_DEVICE, 0}};
static const wsync_cu_access_t access_0 = {{WSYNC_CU_LOCATION_DEVICE, 0},
                                           WSYNC_CU_ACCESS_READ_WRITE};

static wsync_cu_stream_t make_stream(const wsync_cuda_driver_t *cu)
{
    wsync_cu_stream_t stream = NULL;

    CU(cu->stream_create(&stream, WSYNC_CU_STREAM_NON_BLOCKING));
    return stream;
}

static wsync_cu_ptr_t map(const wsync_cuda_driver_t *cu, wsync_cu_handle_t handle)
{
    wsync_cu_ptr_t at = 0;

    CU(cu->mem_reserve(&at, CHUNK, 0, 0, 0));
    CU(cu->mem_map(at, CHUNK, 0, handle, 0));
    CU(cu->mem_set_access(at, CHUNK, &access_0, 1));
    return at;
}

static void unmap(const wsync_cuda_driver_t *cu, wsync_cu_ptr_t at)
{
    CU(cu->mem_unmap(at, CHUNK));
    CU(cu->mem_unreserve(at, CHUNK));
}

static uint64_t read_word(const wsync_cuda_driver_t *cu, wsync_cu_ptr_t at)
{
    wsync_cu_stream_t stream = make_stream(cu);
    uint64_t word = 0;

    CU(cu->memcpy_out_async(&word, at, sizeof(word), stream));
    CU(cu->stream_synchronize(stream));
    CU(cu->stream_destroy(stream));
    return word;
}

TEST(streams_run_in_order_and_behind_their_caller)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_ptr_t at = 0;
    wsync_cu_ptr_t gate_at = 0;
    uint64_t gate = 0;
    uint64_t word = 7;

    CU(cu->mem_alloc(&at, 4096));
    CU(cu->host_register(&gate, sizeof(gate), WSYNC_CU_HOST_DEVICE_MAP));
    CU(cu->host_pointer(&gate_at, &gate, 0));
    CU(cu->stream_wait_value(stream, gate_at, 3, WSYNC_CU_WAIT_GEQ));
    CU(cu->memset_async(at, 1, 4096, stream));
    CU(cu->memset_async(at, 2, 4096, stream));
    CU(cu->memcpy_out_async(&word, at + 8, sizeof(word), stream));
    CU(cu->stream_write_value(stream, gate_at, 9, 0));
    CHECK_EQ(cu->stream_query(stream), WSYNC_CU_NOT_READY);
    __atomic_store_n(&gate, 4, __ATOMIC_RELEASE);
    CU(cu->stream_synchronize(stream));
    CHECK_EQ(word, 0x0202020202020202);
    CHECK_EQ(gate, 9);
    CHECK_EQ(cu->stream_write_value(stream, gate_at + 4, 9, 0), WSYNC_CU_INVALID_VALUE);
    CHECK_EQ(cu->host_register(&gate, 4, 0), WSYNC_CU_ALREADY_REGISTERED);
    CU(cu->host_unregister(&gate));
    CHECK_EQ(cu->host_unregister(&gate), WSYNC_CU_NOT_REGISTERED);
    CHECK_EQ(cu->stream_write_value(stream, gate_at, 9, 0), WSYNC_CU_ILLEGAL_ADDRESS);
    CU(cu->stream_destroy(stream));
    CHECK_EQ(cu->stream_destroy(stream), WSYNC_CU_INVALID_HANDLE);
    CHECK_EQ(cu->stream_query(stream), WSYNC_CU_INVALID_HANDLE);
    CU(cu->mem_free(at));
}

TEST(mapped_memory_keeps_the_driver_s_rules)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_handle_t handle = 0;
    wsync_cu_ptr_t at = 0;

    CHECK_EQ(cu->mem_create(&handle, CHUNK - 1, &exportable, 0), WSYNC_CU_INVALID_VALUE);
    CHECK_EQ(cu->mem_create(&handle, (size_t)CHUNK << 20, &exportable, 0),
             WSYNC_CU_OUT_OF_MEMORY);
    CU(cu->mem_create(&handle, CHUNK, &exportable, 0));
    CU(cu->mem_reserve(&at, 2 * CHUNK, 0, 0, 0));
    CHECK_EQ(cu->memset_async(at, 1, 8, stream), WSYNC_CU_ILLEGAL_ADDRESS);
    CHECK_EQ(cu->mem_map(at, 2 * CHUNK, 0, handle, 0), WSYNC_CU_INVALID_VALUE);
    CU(cu->mem_map(at, CHUNK, 0, handle, 0));
    CHECK_EQ(cu->mem_map(at, CHUNK, 0, handle, 0), WSYNC_CU_INVALID_VALUE);
    CHECK_EQ(cu->memset_async(at, 1, 8, stream), WSYNC_CU_ILLEGAL_ADDRESS);
    CU(cu->mem_set_access(at, CHUNK, &access_0, 1));
    CU(cu->memset_async(at, 1, CHUNK, stream));
    CHECK_EQ(cu->memset_async(at, 1, CHUNK + 1, stream), WSYNC_CU_ILLEGAL_ADDRESS);
    CU(cu->mem_release(handle)); /* the mapping keeps it */
    CHECK_EQ(cu->mem_release(handle), WSYNC_CU_INVALID_VALUE);
    CU(cu->stream_synchronize(stream));
    CHECK_EQ(read_word(cu, at), 0x0101010101010101);
    CHECK_EQ(cu->mem_unreserve(at, 2 * CHUNK), WSYNC_CU_INVALID_VALUE);
    CU(cu->mem_unmap(at, CHUNK));
    CHECK_EQ(cu->mem_unmap(at, CHUNK), WSYNC_CU_INVALID_VALUE);
    CHECK_EQ(cu->memset_async(at, 1, 8, stream), WSYNC_CU_ILLEGAL_ADDRESS);
    CU(cu->mem_unreserve(at, 2 * CHUNK));
    CHECK_EQ(cu->memset_async(at, 1, 8, stream), WSYNC_CU_ILLEGAL_ADDRESS);
    CU(cu->stream_destroy(stream));
    CHECK_EQ(fake_census().physical + fake_census().reserved + fake_census().mapped, 0);
}

TEST(memory_that_a_stream_uses_is_not_taken_away)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_handle_t handle = 0;
    wsync_cu_ptr_t at;
    wsync_cu_ptr_t other = 0;
    wsync_cu_ptr_t gate_at = 0;
    uint64_t gate = 0;

    CU(cu->mem_create(&handle, CHUNK, &exportable, 0));
    at = map(cu, handle);
    CU(cu->mem_alloc(&other, 64));
    CU(cu->host_register(&gate, sizeof(gate), 0));
    CU(cu->host_pointer(&gate_at, &gate, 0));
    CU(cu->stream_wait_value(stream, gate_at, 1, 0));
    CU(cu->memcpy_async(other, at, 64, stream));
    CHECK_EQ(cu->mem_unmap(at, CHUNK), WSYNC_CU_ILLEGAL_STATE);
    CHECK_EQ(cu->mem_free(other), WSYNC_CU_ILLEGAL_STATE);
    CHECK_EQ(cu->host_unregister(&gate), WSYNC_CU_ILLEGAL_STATE);
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
    CU(cu->stream_synchronize(stream));
    CU(cu->host_unregister(&gate));
    CU(cu->mem_free(other));
    CHECK_EQ(cu->mem_free(other), WSYNC_CU_INVALID_VALUE);
    CHECK_EQ(cu->memset_async(other, 0, 1, stream), WSYNC_CU_ILLEGAL_ADDRESS);
    unmap(cu, at);
    CU(cu->mem_release(handle));
}

/* The kernel reads what a process could, and says where it could not. */
static bool can_read(int fd, const void *at)
{
    const ssize_t written = write(fd, at, 8);

    CHECK(written == 8 || (written < 0 && errno == EFAULT));
    return written == 8;
}

TEST(memory_of_the_device_is_not_the_processor_s)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_handle_t handle = 0;
    wsync_cu_ptr_t at[2] = {0};
    int ends[2];

    CHECK_EQ(pipe(ends), 0);
    CU(cu->mem_alloc(&at[0], 64));
    CU(cu->mem_create(&handle, CHUNK, &exportable, 0));
    at[1] = map(cu, handle);
    CU(cu->mem_release(handle));
    for (int i = 0; i < 2; i++) {
        const void *data = (const void *)(uintptr_t)at[i];

        CHECK(!can_read(ends[1], data));
        CHECK(can_read(ends[1], reach(data)));
        CU(cu->memset_async(at[i], 9, 64, stream));
        CU(cu->stream_synchronize(stream));
        CHECK_EQ(((unsigned char *)reach(data))[63], 9);
    }
    CU(cu->mem_free(at[0]));
    unmap(cu, at[1]);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

TEST(the_device_has_addresses_of_its_own_for_memory_of_the_host)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    uint64_t words[4] = {0};
    const wsync_cu_ptr_t host = (uintptr_t)words;
    wsync_cu_ptr_t at = 0;

    CU(cu->host_register(words, sizeof(words), 0));
    CU(cu->host_pointer(&at, &words[1], 0));
    CHECK(at != host + 8 && at % 8 == 0);
    CU(cu->stream_write_value(stream, at, 5, 0));
    CU(cu->stream_synchronize(stream));
    CHECK_EQ(words[1], 5);
    CHECK_EQ(cu->stream_write_value(stream, host, 6, 0), WSYNC_CU_INVALID_VALUE);
    CHECK_EQ(cu->memset_async(host, 6, 8, stream), WSYNC_CU_INVALID_VALUE);
    CHECK(reach((const void *)(uintptr_t)at) == &words[1]);
    CHECK_EQ(cu->host_register(&words[3], 8, 0), WSYNC_CU_ALREADY_REGISTERED);
    CU(cu->host_unregister(words));
    CHECK_EQ(cu->stream_write_value(stream, at, 7, 0), WSYNC_CU_ILLEGAL_ADDRESS);
}

static void import_main(int socket)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    const int fd = hear_fd(socket);
    wsync_cu_handle_t handle = 0;
    wsync_cu_ptr_t at;

    CU(cu->mem_import(&handle, (void *)(intptr_t)fd, WSYNC_CU_HANDLE_FD));
    (void)close(fd);
    at = map(cu, handle);
    CU(cu->mem_release(handle));
    CHECK_EQ(read_word(cu, at), 0x0505050505050505);
    nudge(socket);
    await_nudge(socket); /* the exporter has let go */
    CHECK_EQ(read_word(cu, at), 0x0606060606060606);
    unmap(cu, at);
}

TEST(an_import_sees_the_exporter_s_bytes_and_survives_it)
{
    const peer_t peer = peer_start(import_main);
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_handle_t handle = 0;
    wsync_cu_ptr_t at;
    int fd = -1;

    CU(cu->mem_create(&handle, CHUNK, &exportable, 0));
    at = map(cu, handle);
    CU(cu->memset_async(at, 5, CHUNK, stream));
    CU(cu->stream_synchronize(stream));
    CU(cu->mem_export(&fd, handle, WSYNC_CU_HANDLE_FD, 0));
    say_fd(peer.socket, fd);
    (void)close(fd);
    await_nudge(peer.socket);
    CU(cu->memset_async(at, 6, CHUNK, stream));
    CU(cu->stream_synchronize(stream));
    unmap(cu, at);
    CU(cu->mem_release(handle));
    nudge(peer.socket);
    peer_end(peer);
}

TEST(what_holds_no_memory_is_not_imported)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_property_t kept = exportable;
    wsync_cu_handle_t handle = 0;
    const int file = open("/dev/null", O_RDWR);
    int fd = -1;

    CHECK_EQ(cu->mem_import(&handle, (void *)(intptr_t)file, WSYNC_CU_HANDLE_FD),
             WSYNC_CU_INVALID_VALUE);
    kept.handle_types = 0;
    CU(cu->mem_create(&handle, CHUNK, &kept, 0));
    CHECK_EQ(cu->mem_export(&fd, handle, WSYNC_CU_HANDLE_FD, 0), WSYNC_CU_INVALID_VALUE);
    CU(cu->mem_release(handle));
    (void)close(file);
}

static void open_main(int socket)
{
    const wsync_cuda_driver_t *cu;
    wsync_cu_context_t second = NULL;
    wsync_cu_ipc_t handle;
    wsync_cu_ptr_t at = 0;
    wsync_cu_ptr_t again = 0;

    choose_fake("WSYNC_FAKE_CUDA_DEVICES", "2");
    cu = enter_device(0);
    hear(socket, &handle, sizeof(handle));
    CHECK_EQ(cu->ipc_open_memory(&at, handle, 0), WSYNC_CU_INVALID_VALUE);
    CU(cu->ipc_open_memory(&at, handle, WSYNC_CU_IPC_LAZY_PEER_ACCESS));
    CU(cu->ipc_open_memory(&again, handle, WSYNC_CU_IPC_LAZY_PEER_ACCESS));
    CHECK_EQ(at, again);
    CU(cu->primary_retain(&second, 1));
    CU(cu->context_push(second));
    CHECK_EQ(cu->ipc_open_memory(&again, handle, WSYNC_CU_IPC_LAZY_PEER_ACCESS),
             WSYNC_CU_INVALID_CONTEXT);
    CHECK_EQ(cu->ipc_close_memory(at), WSYNC_CU_INVALID_CONTEXT);
    CU(cu->context_pop(NULL));
    CHECK_EQ(read_word(cu, at), 0x0303030303030303);
    CHECK_EQ(cu->mem_free(at), WSYNC_CU_INVALID_VALUE);
    nudge(socket);
    await_nudge(socket); /* the owner could not free it */
    CU(cu->ipc_close_memory(at));
    CHECK_EQ(read_word(cu, at), 0x0303030303030303);
    CU(cu->ipc_close_memory(at));
    CHECK_EQ(cu->ipc_close_memory(at), WSYNC_CU_INVALID_VALUE);
    nudge(socket);
    await_nudge(socket); /* the owner freed it */
    CHECK_EQ(cu->ipc_open_memory(&at, handle, WSYNC_CU_IPC_LAZY_PEER_ACCESS),
             WSYNC_CU_INVALID_VALUE);
}

TEST(ipc_handles_keep_the_order_of_free_and_close)
{
    const peer_t peer = peer_start(open_main);
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_ipc_t handle;
    wsync_cu_ptr_t at = 0;
    wsync_cu_ptr_t base = 0;
    size_t nbytes = 0;

    CU(cu->mem_alloc(&base, 100000));
    CHECK_EQ(cu->ipc_get_memory(&handle, base), WSYNC_CU_ILLEGAL_STATE);
    CU(cu->mem_free(base));
    CU(cu->mem_alloc(&at, CHUNK));
    CU(cu->memset_async(at, 3, CHUNK, stream));
    CU(cu->stream_synchronize(stream));
    CU(cu->mem_range(&base, &nbytes, at + CHUNK - 1));
    CHECK(base == at && nbytes == CHUNK);
    CHECK_EQ(cu->ipc_get_memory(&handle, at + 512), WSYNC_CU_INVALID_VALUE);
    CU(cu->ipc_get_memory(&handle, at));
    CHECK_EQ(cu->ipc_open_memory(&base, handle, WSYNC_CU_IPC_LAZY_PEER_ACCESS),
             WSYNC_CU_INVALID_CONTEXT);
    say(peer.socket, &handle, sizeof(handle));
    await_nudge(peer.socket);
    CHECK_EQ(cu->mem_free(at), WSYNC_CU_ILLEGAL_STATE);
    nudge(peer.socket);
    await_nudge(peer.socket);
    CU(cu->mem_free(at));
    nudge(peer.socket);
    peer_end(peer);
}

static void open_and_die_main(int socket)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_ipc_t handle;
    wsync_cu_ptr_t at = 0;

    hear(socket, &handle, sizeof(handle));
    CU(cu->ipc_open_memory(&at, handle, WSYNC_CU_IPC_LAZY_PEER_ACCESS));
    nudge(socket);
}

TEST(a_process_that_died_has_nothing_open)
{
    const peer_t peer = peer_start(open_and_die_main);
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_ipc_t handle;
    wsync_cu_ptr_t at = 0;

    CU(cu->mem_alloc(&at, CHUNK));
    CU(cu->ipc_get_memory(&handle, at));
    say(peer.socket, &handle, sizeof(handle));
    await_nudge(peer.socket);
    peer_end(peer);
    CU(cu->mem_free(at));
}

static void event_main(int socket)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_event_t event = NULL;
    wsync_cu_ipc_t handle;

    hear(socket, &handle, sizeof(handle));
    CU(cu->ipc_open_event(&event, handle));
    CHECK_EQ(cu->stream_wait_event(stream, event, 0), WSYNC_CU_ILLEGAL_STATE);
    CHECK_EQ(cu->ipc_get_event(&handle, event), WSYNC_CU_INVALID_HANDLE);
    nudge(socket);
    await_nudge(socket); /* it was recorded, behind a closed gate */
    CU(cu->stream_wait_event(stream, event, 0));
    CHECK_EQ(cu->event_query(event), WSYNC_CU_NOT_READY);
    nudge(socket);
    CU(cu->stream_synchronize(stream));
    CU(cu->event_query(event));
    await_nudge(socket); /* the owner could not destroy it */
    CU(cu->event_destroy(event));
    nudge(socket);
    await_nudge(socket); /* the owner destroyed it */
    CHECK_EQ(cu->ipc_open_event(&event, handle), WSYNC_CU_INVALID_VALUE);
}

TEST(events_order_streams_of_two_processes)
{
    const peer_t peer = peer_start(event_main);
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_event_t event = NULL;
    wsync_cu_event_t again = NULL;
    wsync_cu_ipc_t handle;
    wsync_cu_ptr_t gate_at = 0;
    uint64_t gate = 0;

    CHECK_EQ(cu->event_create(&event, WSYNC_CU_EVENT_INTERPROCESS), WSYNC_CU_INVALID_VALUE);
    CU(cu->event_create(&event,
                        WSYNC_CU_EVENT_INTERPROCESS | WSYNC_CU_EVENT_DISABLE_TIMING));
    CU(cu->ipc_get_event(&handle, event));
    CHECK_EQ(cu->ipc_open_event(&again, handle), WSYNC_CU_INVALID_CONTEXT);
    CHECK_EQ(cu->event_query(event), WSYNC_CU_ILLEGAL_STATE);
    say(peer.socket, &handle, sizeof(handle));
    await_nudge(peer.socket);
    CU(cu->host_register(&gate, sizeof(gate), 0));
    CU(cu->host_pointer(&gate_at, &gate, 0));
    CU(cu->stream_wait_value(stream, gate_at, 1, 0));
    CU(cu->event_record(event, stream));
    nudge(peer.socket);
    await_nudge(peer.socket);
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
    CU(cu->stream_synchronize(stream));
    CU(cu->event_query(event));
    CHECK_EQ(cu->event_destroy(event), WSYNC_CU_ILLEGAL_STATE);
    nudge(peer.socket);
    await_nudge(peer.socket);
    CU(cu->event_destroy(event));
    CHECK_EQ(cu->event_destroy(event), WSYNC_CU_INVALID_HANDLE);
    nudge(peer.socket);
    peer_end(peer);
}

TEST(events_time_what_lies_between_them)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_event_t events[3] = {NULL};
    float ms = -1;

    CU(cu->event_create(&events[0], 0));
    CU(cu->event_create(&events[1], 0));
    CU(cu->event_create(&events[2], WSYNC_CU_EVENT_DISABLE_TIMING));
    CHECK_EQ(cu->stream_wait_event(stream, events[0], 0), WSYNC_CU_ILLEGAL_STATE);
    for (int i = 0; i < 3; i++) {
        CU(cu->event_record(events[i], stream));
    }
    CU(cu->stream_synchronize(stream));
    CU(cu->event_elapsed(&ms, events[0], events[1]));
    CHECK(ms > 0);
    CHECK_EQ(cu->event_elapsed(&ms, events[0], events[2]), WSYNC_CU_INVALID_HANDLE);
    for (int i = 0; i < 3; i++) {
        CU(cu->event_destroy(events[i]));
    }
}

TEST(contexts_are_told_apart)
{
    const wsync_cuda_driver_t *cu;
    wsync_cu_context_t second = NULL;
    wsync_cu_context_t popped = NULL;
    wsync_cu_stream_t stream;
    wsync_cu_event_t event = NULL;
    wsync_cu_ptr_t at = 0;

    choose_fake("WSYNC_FAKE_CUDA_DEVICES", "2");
    cu = enter_device(0);
    stream = make_stream(cu);
    CU(cu->event_create(&event, 0));
    CU(cu->primary_retain(&second, 1));
    CU(cu->context_push(second));
    CHECK_EQ(cu->stream_query(stream), WSYNC_CU_INVALID_CONTEXT);
    CHECK_EQ(cu->event_record(event, stream), WSYNC_CU_INVALID_CONTEXT);
    CHECK_EQ(cu->event_destroy(event), WSYNC_CU_INVALID_CONTEXT);
    CU(cu->context_pop(&popped));
    CHECK(popped == second);
    CU(cu->event_destroy(event));
    CU(cu->stream_destroy(stream));
    CU(cu->context_pop(NULL));
    CHECK_EQ(cu->context_pop(NULL), WSYNC_CU_INVALID_CONTEXT);
    CHECK_EQ(cu->mem_alloc(&at, 1), WSYNC_CU_INVALID_CONTEXT);
    CU(cu->primary_release(1));
    CHECK_EQ(cu->primary_release(1), WSYNC_CU_INVALID_CONTEXT);
    CHECK_EQ(cu->context_push(second), WSYNC_CU_INVALID_CONTEXT);
}

TEST(kernels_get_the_arguments_of_their_launch)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_module_t module = NULL;
    wsync_cu_function_t copy = NULL;
    wsync_cu_function_t function = NULL;
    wsync_cu_ptr_t at = 0;
    uint32_t value = 17;
    uint32_t count = 4;
    void *parameters[] = {&at, &value, &count};

    CU(cu->mem_alloc(&at, 64));
    CU(cu->module_load(&module, "image"));
    CHECK_EQ(cu->module_function(&function, module, "no_such"), WSYNC_CU_NOT_FOUND);
    CU(cu->module_function(&function, module, "fake_fill"));
    CHECK_EQ(cu->launch_kernel(function, 1, 1, 1, 2048, 1, 1, 0, stream, parameters, NULL),
             WSYNC_CU_INVALID_VALUE);
    CU(cu->launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
    value = 18;
    CU(cu->stream_synchronize(stream));
    CHECK_EQ(read_word(cu, at + 8), 0x0000001100000011);
    CHECK_EQ(
        cu->launch_kernel(function, 1, 1, 1, 32, 1, 1, 49153, stream, parameters, NULL),
        WSYNC_CU_INVALID_VALUE);
    CU(cu->module_function(&copy, module, WSYNC_KERNEL_NAME));
    CHECK_EQ(cu->launch_kernel(copy, 1, 1, 1, WSYNC_KERNEL_BLOCK + 32, 1, 1, 0, stream,
                               parameters, NULL),
             701);
    CU(cu->module_unload(module));
    CHECK_EQ(cu->launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL),
             WSYNC_CU_INVALID_HANDLE);
    CHECK_EQ(cu->module_unload(module), WSYNC_CU_INVALID_HANDLE);
    CU(cu->mem_free(at));
}

TEST(memory_that_a_launch_uses_is_not_taken_away)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_module_t module = NULL;
    wsync_cu_function_t function = NULL;
    wsync_cu_ptr_t at = 0;
    wsync_cu_ptr_t other = 0;
    uint32_t value = 17;
    uint32_t count = 4;
    void *parameters[] = {&at, &value, &count};
    wsync_cu_ptr_t gate_at = 0;
    uint64_t gate = 0;

    CU(cu->mem_alloc(&at, 64));
    CU(cu->mem_alloc(&other, 64));
    CU(cu->module_load(&module, "image"));
    CU(cu->module_function(&function, module, "fake_fill"));
    CU(cu->host_register(&gate, sizeof(gate), 0));
    CU(cu->host_pointer(&gate_at, &gate, 0));
    CU(cu->stream_wait_value(stream, gate_at, 1, 0));
    CU(cu->launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
    CHECK_EQ(cu->mem_free(at), WSYNC_CU_ILLEGAL_STATE);
    CU(cu->mem_free(other));
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
    CU(cu->stream_synchronize(stream));
    CU(cu->mem_free(at));
    CHECK_EQ(cu->launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL),
             WSYNC_CU_ILLEGAL_ADDRESS);
}

typedef struct gate {
    uint64_t *word;
    const atomic_bool *through;
} gate_t;

/* Opens when it has been seen for a while that nobody got through. */
static void *open_late(void *argument)
{
    const gate_t *gate = argument;

    (void)usleep(20000);
    CHECK(!atomic_load(gate->through));
    __atomic_store_n(gate->word, 1, __ATOMIC_RELEASE);
    return NULL;
}

TEST(calls_may_wait_for_the_device)
{
    const wsync_cuda_driver_t *cu;
    wsync_cu_stream_t stream;
    wsync_cu_ptr_t at = 0;
    wsync_cu_ptr_t gate_at = 0;
    uint64_t word = 0;
    atomic_bool through = false;
    gate_t gate = {&word, &through};
    pthread_t thread;

    choose_fake("WSYNC_FAKE_CUDA_SYNCS", "1");
    cu = enter_device(0);
    stream = make_stream(cu);
    CU(cu->host_register(&word, sizeof(word), 0));
    CU(cu->host_pointer(&gate_at, &word, 0));
    CU(cu->stream_wait_value(stream, gate_at, 1, 0));
    CHECK_EQ(pthread_create(&thread, NULL, open_late, &gate), 0);
    CU(cu->mem_alloc(&at, 64));
    atomic_store(&through, true);
    CHECK_EQ(word, 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CU(cu->memset_async(at, 1, 64, stream));
    CU(cu->mem_free(at)); /* it is in use, until this has waited */
    CU(cu->host_unregister(&word));
}

/* What a stream waits for holds those that share its queue: every second one. */
TEST(streams_share_queues)
{
    enum { STREAMS = 4 };
    const wsync_cuda_driver_t *cu;
    wsync_cu_stream_t streams[STREAMS];
    wsync_cu_ptr_t gate_at = 0;
    uint64_t words[STREAMS] = {0};

    choose_fake("WSYNC_FAKE_CUDA_CONNECTIONS", "2");
    cu = enter_device(0);
    CU(cu->host_register(words, sizeof(words), 0));
    CU(cu->host_pointer(&gate_at, words, 0));
    for (int i = 0; i < STREAMS; i++) {
        streams[i] = make_stream(cu);
    }
    CU(cu->stream_wait_value(streams[0], gate_at, 1, 0));
    for (unsigned i = 1; i < STREAMS; i++) {
        CU(cu->stream_write_value(streams[i], gate_at + i * sizeof(words[0]), 1, 0));
    }
    CU(cu->stream_synchronize(streams[1]));
    CU(cu->stream_synchronize(streams[3]));
    CHECK_EQ(cu->stream_query(streams[2]), WSYNC_CU_NOT_READY);
    __atomic_store_n(&words[0], 1, __ATOMIC_RELEASE);
    CU(cu->stream_synchronize(streams[2]));
    CHECK_EQ(words[2], 1);
    CU(cu->host_unregister(words));
}

/* And with it those of its priority alone. */
TEST(streams_of_other_priorities_have_queues_of_their_own)
{
    const wsync_cuda_driver_t *cu;
    wsync_cu_stream_t first = NULL;
    wsync_cu_stream_t stream;
    wsync_cu_ptr_t gate_at = 0;
    uint64_t word = 0;
    int least = 1;
    int greatest = 1;

    choose_fake("WSYNC_FAKE_CUDA_CONNECTIONS", "1");
    cu = enter_device(0);
    CU(cu->context_priorities(&least, &greatest));
    CHECK(least == 0 && greatest == -5);
    CHECK_EQ(cu->stream_create_with_priority(&first, 1, greatest - 1),
             WSYNC_CU_INVALID_VALUE);
    CU(cu->stream_create_with_priority(&first, 1, greatest));
    stream = make_stream(cu);
    CU(cu->host_register(&word, sizeof(word), 0));
    CU(cu->host_pointer(&gate_at, &word, 0));
    CU(cu->stream_wait_value(first, gate_at, 1, 0));
    CU(cu->stream_write_value(stream, gate_at, 1, 0));
    CU(cu->stream_synchronize(first));
    CU(cu->host_unregister(&word));
    CU(cu->stream_destroy(first));
    CU(cu->stream_destroy(stream));
}

TEST(devices_may_not_reach_each_other)
{
    const wsync_cuda_driver_t *cu;
    wsync_cu_property_t other = exportable;
    wsync_cu_access_t access = access_0;
    wsync_cu_handle_t handle = 0;
    wsync_cu_ptr_t at = 0;

    choose_fake("WSYNC_FAKE_CUDA_DEVICES", "2");
    choose_fake("WSYNC_FAKE_CUDA_PEERS", "0");
    cu = enter_device(0);
    other.location.id = 1;
    CU(cu->mem_create(&handle, CHUNK, &other, 0));
    CU(cu->mem_reserve(&at, CHUNK, 0, 0, 0));
    CU(cu->mem_map(at, CHUNK, 0, handle, 0));
    CHECK_EQ(cu->mem_set_access(at, CHUNK, &access, 1), 217);
    access.location.id = 1;
    CU(cu->mem_set_access(at, CHUNK, &access, 1));
    CU(cu->mem_release(handle));
    unmap(cu, at);
}

/* An address of one version is none for the parameters of another. */
TEST(names_mean_what_they_mean_in_a_version)
{
    static const struct {
        const char *symbol;
        int version;
        uint64_t flags;
        int code;
    } asked[] = {
        {"cuDeviceGetUuid", 11040, 1, WSYNC_CU_SUCCESS},
        {"cuDeviceGetUuid", 9020, 1, WSYNC_CU_NOT_FOUND},
        {"cuStreamWaitValue64", 9000, 1, WSYNC_CU_NOT_FOUND},
        {"cuEventElapsedTime", 12070, 1, WSYNC_CU_SUCCESS},
        {"cuEventElapsedTime", 12080, 1, WSYNC_CU_NOT_FOUND},
        {"cuMemcpyBatchAsync", 12080, 1, WSYNC_CU_SUCCESS},
        {"cuMemcpyBatchAsync", 13000, 1, WSYNC_CU_NOT_FOUND},
        {"cuMemCreate", 13000, 1, WSYNC_CU_SUCCESS},
        {"cuMemCreate", 10010, 1, WSYNC_CU_NOT_FOUND},
        {"cuLaunchKernel", 4000, 2, WSYNC_CU_NOT_FOUND},
        {"cuNoSuchCall", 13000, 1, WSYNC_CU_NOT_FOUND},
    };
    int (*look_up)(const char *, void **, int, uint64_t, int *);
    void *address;

    (void)load_driver();
    address = fake_symbol("cuGetProcAddress_v2");
    memcpy(&look_up, (const void *)&address, sizeof(look_up));
    for (size_t i = 0; i < sizeof(asked) / sizeof(asked[0]); i++) {
        int status = -1;
        const int code =
            look_up(asked[i].symbol, &address, asked[i].version, asked[i].flags, &status);

        CHECK_EQ(code, asked[i].code);
        CHECK_EQ(address != NULL, code == WSYNC_CU_SUCCESS);
        CHECK_EQ(status, code != WSYNC_CU_SUCCESS);
    }
}

TEST(a_batch_of_copies_has_no_order)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    wsync_cu_copy_attributes_t attributes = {.source_order = WSYNC_CU_COPY_ORDER_STREAM};
    wsync_cu_ptr_t at = 0;
    wsync_cu_ptr_t from[2];
    wsync_cu_ptr_t to[2];
    size_t sizes[2] = {8, 8};
    size_t start = 0;
    size_t failed = 0;

    CU(cu->mem_alloc(&at, 64));
    CU(cu->memset_async(at, 1, 8, stream));
    CU(cu->memset_async(at + 8, 2, 8, stream));
    from[0] = at;
    from[1] = at + 8;
    to[0] = to[1] = at + 16;
    CU(cu->memcpy_batch_async(to, from, sizes, 2, &attributes, &start, 1, &failed, stream));
    CHECK_EQ(failed, SIZE_MAX);
    CU(cu->stream_synchronize(stream));
    CHECK_EQ(read_word(cu, at + 16), 0x0101010101010101);
    to[0] = at + 64;
    from[1] = at;
    CHECK_EQ(
        cu->memcpy_batch_async(to, from, sizes, 2, &attributes, &start, 1, &failed, stream),
        WSYNC_CU_INVALID_VALUE);
    CHECK_EQ(failed, 0);
    CU(cu->stream_synchronize(stream));
    CHECK_EQ(read_word(cu, at + 16), 0x0101010101010101);
    sizes[0] = 0;
    CHECK_EQ(
        cu->memcpy_batch_async(to, from, sizes, 1, &attributes, &start, 1, &failed, stream),
        WSYNC_CU_INVALID_VALUE);
    attributes.source_order = 0;
    CHECK_EQ(
        cu->memcpy_batch_async(to, from, sizes, 1, &attributes, &start, 1, &failed, stream),
        WSYNC_CU_INVALID_VALUE);
    CU(cu->mem_free(at));
    CU(cu->stream_destroy(stream));
}

TEST(a_driver_of_before_has_no_batches)
{
    const wsync_cuda_driver_t *cu;

    choose_fake("WSYNC_FAKE_CUDA_VERSION", "12040");
    cu = load_driver();
    CHECK_EQ(cu->version, 12040);
    CHECK(cu->memcpy_batch_async == NULL);
}

typedef struct caller {
    const wsync_cuda_driver_t *cu;
    wsync_cu_context_t context;
    int codes[3];
} caller_t;

static void call_driver(void *argument)
{
    caller_t *caller = argument;
    wsync_cu_ptr_t at = 0;

    caller->codes[0] = caller->cu->context_push(caller->context);
    caller->codes[1] = caller->cu->mem_alloc(&at, 64);
    caller->codes[2] = caller->cu->mem_free(at);
}

TEST(host_functions_of_streams_make_no_calls)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_stream_t stream = make_stream(cu);
    caller_t caller = {.cu = cu};

    CU(cu->primary_retain(&caller.context, 0));
    CU(cu->launch_host(stream, call_driver, &caller));
    CU(cu->stream_synchronize(stream));
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(caller.codes[i], WSYNC_CU_NOT_PERMITTED);
    }
    CHECK_EQ(fake_census().allocated, 0);
    CU(cu->stream_destroy(stream));
}

TEST(the_kth_call_of_a_name_fails)
{
    const wsync_cuda_driver_t *cu;
    wsync_cu_ptr_t at = 0;
    wsync_cu_ptr_t other = 0;

    choose_fake("WSYNC_FAKE_CUDA_FAIL", "cuMemAlloc:1:2");
    cu = enter_device(0);
    CU(cu->mem_alloc(&at, 64));
    CHECK(fake_failed() == NULL);
    CHECK_EQ(cu->mem_alloc(&other, 64), WSYNC_CU_OUT_OF_MEMORY);
    CHECK_STR(fake_failed(), "cuMemAlloc");
    CU(cu->mem_alloc(&other, 64));
    fake_fail("*", 1, WSYNC_CU_LAUNCH_FAILED);
    CU(cu->mem_free(at));
    CHECK_EQ(cu->mem_free(other), WSYNC_CU_LAUNCH_FAILED); /* freed all the same */
    CHECK_EQ(fake_census().allocated, 0);
}

TEST(a_kernel_faults_long_after_its_launch)
{
    const wsync_cuda_driver_t *cu;
    wsync_cu_stream_t stream;
    wsync_cu_module_t module = NULL;
    wsync_cu_function_t function = NULL;
    wsync_cu_ptr_t at = 0;
    wsync_cu_ptr_t gate_at = 0;
    uint64_t gate = 0;
    uint32_t value = 17;
    uint32_t count = 4;
    void *parameters[] = {&at, &value, &count};

    choose_fake("WSYNC_FAKE_CUDA_FAULT", "1:719");
    cu = enter_device(0);
    stream = make_stream(cu);
    CU(cu->mem_alloc(&at, 64));
    CU(cu->module_load(&module, "image"));
    CU(cu->module_function(&function, module, "fake_fill"));
    CU(cu->host_register(&gate, sizeof(gate), 0));
    CU(cu->host_pointer(&gate_at, &gate, 0));
    CU(cu->launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
    CU(cu->stream_wait_value(stream, gate_at, 1, 0));
    CU(cu->launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
    CU(cu->stream_write_value(stream, gate_at, 9, 0));
    CHECK_EQ(cu->stream_query(stream), WSYNC_CU_NOT_READY);
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
    while (cu->stream_query(stream) == WSYNC_CU_NOT_READY) {
        (void)usleep(1000);
    }
    CHECK_EQ(cu->stream_query(stream), WSYNC_CU_LAUNCH_FAILED);
    CHECK_EQ(cu->mem_free(at), WSYNC_CU_LAUNCH_FAILED);
    CHECK_EQ(cu->mem_alloc(&at, 64), WSYNC_CU_LAUNCH_FAILED);
    for (int i = 0; i < 20 && __atomic_load_n(&gate, __ATOMIC_ACQUIRE) == 1; i++) {
        (void)usleep(1000); /* time for what must not run */
    }
    CHECK_EQ(gate, 1);
}

TEST(the_log_has_every_call_and_every_refusal)
{
    char path[] = "/var/tmp/wsync-fake-XXXXXX";
    char text[4096] = "";
    const int fd = mkstemp(path);
    const wsync_cuda_driver_t *cu;

    CHECK(fd >= 0);
    choose_fake("WSYNC_FAKE_CUDA_LOG", path);
    cu = enter_device(0);
    CHECK_EQ(cu->mem_free(4096), WSYNC_CU_INVALID_VALUE);
    CHECK(pread(fd, text, sizeof(text) - 1, 0) > 0);
    CHECK_HAS(text, " cuInit\n");
    CHECK_HAS(text, " cuCtxPushCurrent\n");
    CHECK_HAS(text, " refused 1: cuMemFree: nothing is allocated there\n");
    (void)unlink(path);
    (void)close(fd);
}

TEST(memory_runs_out)
{
    const wsync_cuda_driver_t *cu;
    wsync_cu_handle_t handle = 0;
    wsync_cu_ptr_t at = 0;
    size_t left = 0;
    size_t total = 0;

    choose_fake("WSYNC_FAKE_CUDA_MEMORY", "4194304");
    cu = enter_device(0);
    CU(cu->mem_create(&handle, CHUNK, &exportable, 0));
    CU(cu->mem_get_info(&left, &total));
    CHECK(left == CHUNK && total == 2 * CHUNK);
    CHECK_EQ(cu->mem_alloc(&at, CHUNK + 1), WSYNC_CU_OUT_OF_MEMORY);
    CU(cu->mem_release(handle));
    CU(cu->mem_alloc(&at, CHUNK + 1));
    CU(cu->mem_free(at));
}

TEST(a_fork_of_a_process_with_a_driver_has_none)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    const wsync_cuda_driver_t *there = NULL;
    int status = 0;
    const pid_t child = fork();

    if (child == 0) {
        wsync_cu_ptr_t at = 0;
        wsync_error_t err = {0};

        CHECK_EQ(cu->mem_alloc(&at, 1), WSYNC_CU_NOT_INITIALIZED);
        CHECK_EQ(wsync_cuda_driver(&there, &err), WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "spawn");
        CHECK(there == NULL);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQ(cu->device_get_count(&status), WSYNC_CU_SUCCESS);
}

static void take_memory_main(int socket)
{
    const wsync_cuda_driver_t *cu = enter_device(0);
    wsync_cu_ptr_t at = 0;

    CU(cu->mem_alloc(&at, CHUNK));
    nudge(socket);
    await_nudge(socket);
}

TEST(processes_have_the_memory_of_a_device_together)
{
    char path[] = "/var/tmp/wsync-board-XXXXXX";
    const int fd = mkstemp(path);
    const wsync_cuda_driver_t *cu;
    wsync_cu_ptr_t at = 0;
    size_t left = 0;
    size_t total = 0;
    peer_t peer;

    CHECK(fd >= 0);
    choose_fake("WSYNC_FAKE_CUDA_MEMORY", "4194304");
    choose_fake("WSYNC_FAKE_CUDA_BOARD", path);
    peer = peer_start(take_memory_main);
    await_nudge(peer.socket);
    cu = enter_device(0);
    CU(cu->mem_get_info(&left, &total));
    CHECK(left == CHUNK && total == 2 * CHUNK);
    CHECK_EQ(cu->mem_alloc(&at, CHUNK + 1), WSYNC_CU_OUT_OF_MEMORY);
    nudge(peer.socket);
    peer_end(peer); /* a process leaves nothing behind */
    CU(cu->mem_alloc(&at, CHUNK + 1));
    CU(cu->mem_free(at));
    (void)unlink(path);
    (void)close(fd);
}
