/* SPDX-License-Identifier: Apache-2.0
 * GPU streams on tests/fakecuda: what they ask of the driver, against the host backend, and
 * with every call failing. */
#include <pthread.h>

#include "cuda_rig.h"
#include "device/cuda_tables.h"
#include "device/deadline.h"

TEST(copies_are_those_of_the_host)
{
    const wsync_device_t *device = gpu();
    const wsync_device_t *host = wsync_device_host();
    wsync_memory_t *from = make_buffer(device, NBYTES);
    wsync_memory_t *to = make_buffer(device, NBYTES);
    wsync_memory_t *expected = make_buffer(host, NBYTES);
    wsync_stream_t *stream = make_stream(device);
    wsync_stream_t *reference = make_stream(host);
    const wsync_span_t source = span_of(from);
    const wsync_span_t same = {reach(source.data), NBYTES};
    const wsync_span_t destination = span_of(to);
    const wsync_span_t wanted = span_of(expected);
    wsync_error_t err = {0};

    fill(same.data, NBYTES, 1);
    for (int count = 1; count <= SHAPES; count++) {
        memset(reach(destination.data), 0, NBYTES);
        memset(wanted.data, 0, NBYTES);
        CHECK_OK(wsync_stream_copy_list(stream, shapes, (size_t)count, &source, 1,
                                        &destination, 1, &err),
                 err);
        CHECK_OK(wsync_stream_copy_list(reference, shapes, (size_t)count, &same, 1, &wanted,
                                        1, &err),
                 err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
        CHECK_OK(wsync_stream_synchronize(reference, PATIENT_MS, &err), err);
        CHECK(memcmp(reach(destination.data), wanted.data, NBYTES) == 0);
    }
    wsync_stream_destroy(stream);
    wsync_stream_destroy(reference);
    wsync_memory_destroy(from);
    wsync_memory_destroy(to);
    wsync_memory_destroy(expected);
}

static const wsync_cuda_table_t *table_of(wsync_cuda_tables_t *tables, uint64_t id,
                                          const wsync_copy_t *copies)
{
    const wsync_cuda_table_t *table = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_tables_segments(tables, id, copies, 1, &table, &err), err);
    return table;
}

TEST(a_list_of_copies_is_known_by_its_number_until_tables_are_forgotten)
{
    static wsync_cuda_tables_t tables;
    const rig_t rig = make_rig(NBYTES);
    wsync_copy_t list = shapes[0];
    const wsync_cuda_table_t *first;
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_enter(rig.device, &err), err);
    tables.device = rig.device;
    CU(rig.device->driver->stream_create(&tables.uploads, WSYNC_CU_STREAM_NON_BLOCKING));
    first = table_of(&tables, 7, &list);
    list.source_offset++; /* nobody looks */
    CHECK(table_of(&tables, 7, &list) == first);
    CHECK(table_of(&tables, 8, &list) != first);
    list.source_offset--;
    CHECK(table_of(&tables, 0, &list) == first);
    list.source_offset++;
    CHECK(table_of(&tables, 0, &list) != first);
    CHECK(table_of(&tables, 8, &list) != first);
    CHECK_EQ(tables.uploaded, 2);
    wsync_cuda_tables_clear(&tables);
    (void)table_of(&tables, 8, &list);
    CHECK_EQ(tables.uploaded, 3);
    wsync_cuda_tables_clear(&tables);
    CU(rig.device->driver->stream_destroy(tables.uploads));
    wsync_cuda_leave(rig.device);
    end_rig(&rig);
}

/* --- what is asked of the driver
 * ---------------------------------------------------------- */

static bool becomes_idle(const wsync_cuda_driver_t *driver, wsync_cu_stream_t stream)
{
    const uint64_t deadline = wsync_deadline_ns(PATIENT_MS);

    while (driver->stream_query(stream) == WSYNC_CU_NOT_READY &&
           wsync_clock_ns() < deadline) {
        (void)usleep(1000);
    }
    return driver->stream_query(stream) == WSYNC_CU_SUCCESS;
}

/* Where streams share one queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1, those of torch and
 * NCCL go on while wsync's waits for another process, and so do uploads. */
TEST(a_stream_that_waits_keeps_no_others)
{
    char text[CALLS_NBYTES];
    const int fd = open_log();
    const wsync_cuda_driver_t *driver;
    wsync_cu_stream_t other = NULL;
    wsync_stream_t *uploader;
    wsync_error_t err = {0};
    off_t before;
    rig_t rig;

    choose_fake("WSYNC_FAKE_CUDA_CONNECTIONS", "1");
    driver = enter_device(0);
    CU(driver->stream_create(&other, WSYNC_CU_STREAM_NON_BLOCKING));
    rig = make_rig(NBYTES);
    before = lseek(fd, 0, SEEK_END);
    uploader = make_stream(rig.base);
    read_calls(fd, before, text);
    CHECK_STR(text, "cuStreamCreateWithPriority cuStreamCreate ");
    CHECK_OK(wsync_stream_wait(rig.stream, (wsync_event_t){rig.control, 0}, 1, &err), err);
    CU(driver->memset_async((uintptr_t)rig.target.data, 1, 64, other));
    CHECK(becomes_idle(driver, other));
    /* Its tables are on the device when this returns. */
    CHECK_OK(wsync_stream_copy_list(uploader, shapes, SHAPES, &rig.target, 1, &rig.target,
                                    1, &err),
             err);
    CHECK_EQ(wsync_stream_synchronize(rig.stream, 0, &err), WSYNC_ERR_TIMEOUT);
    wsync_event_set((wsync_event_t){rig.control, 0}, 1);
    CU(driver->stream_destroy(other));
    wsync_stream_destroy(uploader);
    end_rig(&rig);
}

/* Buffers that moved cost an upload of addresses, not of the plan. */
TEST(moved_buffers_are_bound_anew)
{
    char text[CALLS_NBYTES];
    const int fd = open_log();
    const wsync_device_t *device = gpu();
    wsync_memory_t *buffers[3] = {make_buffer(device, NBYTES), make_buffer(device, NBYTES),
                                  make_buffer(device, NBYTES)};
    wsync_stream_t *stream = make_stream(device);
    const wsync_span_t source = span_of(buffers[0]);
    off_t before;
    wsync_error_t err = {0};

    fill(reach(source.data), NBYTES, 1);
    for (int i = 1; i < 3; i++) {
        const wsync_span_t destination = span_of(buffers[i]);

        before = lseek(fd, 0, SEEK_END);
        CHECK_OK(wsync_stream_copy_list(stream, shapes, SHAPES, &source, 1, &destination, 1,
                                        &err),
                 err);
    }
    read_calls(fd, before, text);
    CHECK_STR(text,
              "cuPointerGetAttributes cuMemGetAddressRange cuMemcpyHtoDAsync "
              "cuStreamSynchronize cuLaunchKernel ");
    CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
    CHECK(memcmp(bytes_of(buffers[1]), bytes_of(buffers[2]), NBYTES) == 0);
    wsync_stream_destroy(stream);
    for (int i = 0; i < 3; i++) {
        wsync_memory_destroy(buffers[i]);
    }
}

/* Copy engines are not trusted with it. */
TEST(a_long_run_between_memory_of_devices_is_a_launch)
{
    const wsync_copy_t run = {
        .row_count = NBYTES, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    char text[CALLS_NBYTES];
    const int fd = open_log();
    const wsync_device_t *device = gpu();
    wsync_memory_t *from = make_buffer(device, NBYTES);
    wsync_memory_t *to = make_buffer(device, NBYTES);
    wsync_stream_t *stream = make_stream(device);
    const wsync_span_t source = span_of(from);
    const wsync_span_t destination = span_of(to);
    const off_t before = lseek(fd, 0, SEEK_END);
    wsync_error_t err = {0};

    fill(reach(source.data), NBYTES, 1);
    CHECK_OK(wsync_stream_copy_list(stream, &run, 1, &source, 1, &destination, 1, &err),
             err);
    read_calls(fd, before, text);
    CHECK_HAS(text, "cuLaunchKernel");
    CHECK(strstr(text, "cuMemcpyAsync") == NULL);
    CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
    CHECK(memcmp(reach(source.data), reach(destination.data), NBYTES) == 0);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(from);
    wsync_memory_destroy(to);
}
