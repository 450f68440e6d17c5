/* SPDX-License-Identifier: Apache-2.0
 * What GPU streams read besides their own device's memory, on tests/fakecuda. */
#include "cuda_fixture.h"
#include "device_fixture.h"

enum { NBYTES = 1 << 20 };

static const wsync_device_ops_t *gpu(void)
{
    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    return test_device();
}

static wsync_stream_t *make_stream(const wsync_device_ops_t *ops)
{
    wsync_stream_t *stream = NULL;
    wsync_error_t err = {0};

    CHECK_OK(ops->stream_create(2, &stream, &err), err);
    return stream;
}

/* A device that reaches all memory takes what malloc gave on both sides. */
TEST(a_coherent_device_uses_host_memory_as_its_own)
{
    static const wsync_copy_t copy = {
        .row_count = NBYTES / 2, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    const wsync_cuda_device_t *device = NULL;
    const wsync_device_ops_t *ops;
    wsync_stream_t *stream;
    unsigned char *memory = malloc(NBYTES);
    const wsync_span_t source = {memory, NBYTES / 2};
    const wsync_span_t destination = {memory + NBYTES / 2, NBYTES / 2};
    wsync_error_t err = {0};

    choose_fake("WSYNC_FAKE_CUDA_PAGEABLE", "1");
    ops = gpu();
    CHECK_OK(wsync_cuda_device(0, &device, &err), err);
    CHECK(device->pageable);
    for (int i = 0; i < NBYTES; i++) {
        memory[i] = (unsigned char)(i < NBYTES / 2 ? i * 7 : 0);
    }
    stream = make_stream(ops);
    CHECK_OK(ops->stream_copy(stream, &copy, 1, &source, 1, &destination, 1, &err), err);
    CHECK_OK(ops->stream_synchronize(stream, PATIENT_MS, &err), err);
    CHECK(memcmp(source.data, destination.data, NBYTES / 2) == 0);
    ops->stream_destroy(stream);
    free(memory);
}

TEST(a_device_reaches_only_what_it_was_given_by_default)
{
    const wsync_cuda_device_t *device = NULL;
    wsync_error_t err = {0};

    choose_fake(NULL, NULL);
    CHECK_OK(wsync_cuda_device(0, &device, &err), err);
    CHECK(!device->pageable);
}
