/* SPDX-License-Identifier: Apache-2.0
 * Quantising by GPU streams, on tests/fakecuda: what they ask of the driver, whose memory
 * they take, and with every call failing. */
#include <math.h>

#include "cuda_rig.h"

enum {
    ROWS = 200,
    COLS = 320,
    WEIGHTS_NBYTES = 2 * ROWS * COLS,
    ENTRIES = 8,
    IMAGE_NBYTES = 256 * 1024,
    PIECES = 3,
    EVERYTHING = 1024 * 1024,
    TABLE_AT = IMAGE_NBYTES,
    WEIGHTS_AT = 512 * 1024,
};

/* Blocks that need a table of the stream's own, blocks of one row, and blocks of which the
 * caller's table says what they hold. */
static const wsync_quantise_piece_t pieces[PIECES] = {
    {.tensor = "w0",
     .method = {WSYNC_QUANTISE_FP8_BLOCK, true, 128, 128},
     .dtype = WSYNC_DTYPE_BFLOAT16,
     .source_stride = {2 * COLS, 2},
     .extent = {ROWS, COLS},
     .codes_stride = COLS,
     .scales = 65536,
     .scales_stride = 12,
     .amaxes = WSYNC_QUANTISE_NONE,
     .overall = WSYNC_QUANTISE_NONE,
     .second = WSYNC_QUANTISE_NONE},
    {.tensor = "w1",
     .method = {WSYNC_QUANTISE_NVFP4, false, 1, 16},
     .dtype = WSYNC_DTYPE_BFLOAT16,
     .source_buffer = 1,
     .source_stride = {2 * COLS, 2},
     .extent = {ROWS, COLS},
     .codes = 70000,
     .codes_stride = COLS / 2,
     .scales = 110000,
     .scales_stride = COLS / 16,
     .amaxes = WSYNC_QUANTISE_NONE,
     .overall = 1,
     .second = 120000},
    {.tensor = "w2",
     .method = {WSYNC_QUANTISE_FP8_TENSOR, false, 0, 0},
     .dtype = WSYNC_DTYPE_BFLOAT16,
     .source_stride = {2 * COLS, 2},
     .extent = {ROWS, COLS},
     .codes = 130000,
     .codes_stride = COLS,
     .scales = 200000,
     .scales_stride = 4,
     .amaxes = 2,
     .amax_stride = 1,
     .overall = WSYNC_QUANTISE_NONE,
     .second = WSYNC_QUANTISE_NONE},
};

/* Image, table of amaxes and weights, in one memory. */
typedef struct scene {
    wsync_memory_t *memory;
    wsync_span_t sources[2];
    wsync_quantise_batch_t batch;
} scene_t;

static unsigned char *at(const scene_t *scene, uint64_t offset)
{
    return (unsigned char *)scene->memory->data + offset;
}

static unsigned char *bytes(const scene_t *scene, uint64_t offset)
{
    return reach(at(scene, offset));
}

static void reset(const scene_t *scene)
{
    memset(bytes(scene, 0), 0xa5, IMAGE_NBYTES);
    memset(bytes(scene, TABLE_AT), 0, ENTRIES * sizeof(float));
}

/* `batch` points into the scene. */
static void scene_init(scene_t *scene, const wsync_device_t *device)
{
    scene->memory = make_buffer(device, EVERYTHING);
    scene->sources[0] = (wsync_span_t){at(scene, WEIGHTS_AT), WEIGHTS_NBYTES};
    scene->sources[1] = (wsync_span_t){at(scene, WEIGHTS_AT + 256 * 1024), WEIGHTS_NBYTES};
    fill(reach(scene->sources[0].data), WEIGHTS_NBYTES, 1);
    fill(reach(scene->sources[1].data), WEIGHTS_NBYTES, 2);
    scene->batch = (wsync_quantise_batch_t){
        .pieces = pieces,
        .count = PIECES,
        .sources = scene->sources,
        .source_count = 2,
        .image = {at(scene, 0), IMAGE_NBYTES},
        .amaxes = {at(scene, TABLE_AT), ENTRIES * sizeof(float)},
    };
    reset(scene);
}

static wsync_status_t quantise(wsync_stream_t *stream, const scene_t *scene,
                               wsync_quantise_pass_t pass, wsync_error_t *err)
{
    wsync_quantise_batch_t batch = scene->batch;

    batch.pass = pass;
    return wsync_stream_quantise(stream, &batch, err);
}

static void run_passes(wsync_stream_t *stream, const scene_t *scene)
{
    wsync_error_t err = {0};

    CHECK_OK(quantise(stream, scene, WSYNC_QUANTISE_AMAXES, &err), err);
    CHECK_OK(quantise(stream, scene, WSYNC_QUANTISE_CODES, &err), err);
    CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
}

/* What the host makes of the same weights. */
static void check_scene(const scene_t *scene)
{
    wsync_stream_t *stream = make_stream(wsync_device_host());
    scene_t wanted;

    scene_init(&wanted, wsync_device_host());
    memcpy(bytes(&wanted, WEIGHTS_AT), bytes(scene, WEIGHTS_AT), EVERYTHING - WEIGHTS_AT);
    run_passes(stream, &wanted);
    CHECK(memcmp(bytes(&wanted, 0), bytes(scene, 0), WEIGHTS_AT) == 0);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(wanted.memory);
}

TEST(passes_are_those_of_the_host)
{
    wsync_stream_t *stream = make_stream(gpu());
    scene_t scene;

    scene_init(&scene, gpu());
    for (uint32_t round = 0; round < 3; round++) {
        fill(reach(scene.sources[0].data), WEIGHTS_NBYTES, round);
        reset(&scene);
        run_passes(stream, &scene);
        check_scene(&scene);
    }
    wsync_stream_destroy(stream);
    wsync_memory_destroy(scene.memory);
}

TEST(tables_are_uploaded_once)
{
    char path[] = "/var/tmp/wsync-calls-XXXXXX";
    char text[CALLS_NBYTES];
    const int fd = open_log(path);
    wsync_stream_t *stream = make_stream(gpu());
    wsync_error_t err = {0};
    scene_t scene;

    scene_init(&scene, gpu());
    for (int round = 0; round < 2; round++) {
        off_t before = lseek(fd, 0, SEEK_END);

        CHECK_OK(quantise(stream, &scene, WSYNC_QUANTISE_AMAXES, &err), err);
        read_calls(fd, before, text);
        if (round == 0) {
            CHECK_HAS(text, "cuMemcpyHtoDAsync");
            CHECK_EQ(wsync_stream_ahead(stream), 0);
        } else {
            CHECK_STR(text, "cuLaunchKernel ");
            CHECK_EQ(wsync_stream_ahead(stream), WSYNC_STREAM_AHEAD);
        }
        before = lseek(fd, 0, SEEK_END);
        CHECK_OK(quantise(stream, &scene, WSYNC_QUANTISE_CODES, &err), err);
        read_calls(fd, before, text);
        CHECK_STR(text, "cuMemsetD8Async cuLaunchKernel cuLaunchKernel ");
    }
    CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
    check_scene(&scene);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(scene.memory);
    (void)unlink(path);
    (void)close(fd);
}

TEST(copies_alone_are_traced)
{
    const rig_t rig = make_rig(NBYTES);
    wsync_stream_span_t *spans = NULL;
    size_t count = 0;
    wsync_error_t err = {0};
    scene_t scene;

    scene_init(&scene, rig.base);
    wsync_stream_trace(rig.stream, calloc(4, sizeof(*spans)), 4, &spans, &count);
    CHECK_OK(quantise(rig.stream, &scene, WSYNC_QUANTISE_AMAXES, &err), err);
    enqueue(&rig, shapes, 1, &rig.target, 1);
    CHECK_OK(quantise(rig.stream, &scene, WSYNC_QUANTISE_CODES, &err), err);
    synchronize(&rig);
    wsync_stream_trace(rig.stream, NULL, 0, &spans, &count);
    CHECK_EQ(count, 1);
    free(spans);
    wsync_memory_destroy(scene.memory);
    end_rig(&rig);
}

/* Refused, with what is named, and untouched. */
static void refuse(wsync_stream_t *stream, const scene_t *scene, const char *text)
{
    wsync_error_t err = {0};

    CHECK_EQ(quantise(stream, scene, WSYNC_QUANTISE_CODES, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, text);
    CHECK_HAS(err.message, "is pageable memory of the host, which GPU 0");
    CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
    CHECK_EQ(*(unsigned char *)reach(scene->batch.image.data), 0xa5);
}

TEST(memory_that_the_gpu_does_not_reach_is_named)
{
    const rig_t rig = make_rig(NBYTES);
    const wsync_span_t host = new_source(EVERYTHING, 2);
    scene_t scene;
    scene_t other;

    scene_init(&scene, rig.base);
    memset(host.data, 0xa5, EVERYTHING);
    other = scene;
    other.batch.sources = other.sources;
    other.sources[1] = (wsync_span_t){host.data, WEIGHTS_NBYTES};
    refuse(rig.stream, &other, "w1: buffer 1, 128000 bytes at ");
    other = scene;
    other.batch.image.data = host.data;
    refuse(rig.stream, &other, "the image, 262144 bytes at ");
    other = scene;
    other.batch.amaxes.data = host.data;
    refuse(rig.stream, &other, "the table of amaxes, 32 bytes at ");
    /* The same weights, registered. */
    memcpy(host.data, reach(scene.sources[1].data), WEIGHTS_NBYTES);
    scene.sources[1].data = host.data;
    pin(&rig, host.data, EVERYTHING);
    run_passes(rig.stream, &scene);
    check_scene(&scene);
    unpin(&rig, host.data);
    wsync_memory_destroy(scene.memory);
    free(host.data);
    end_rig(&rig);
}

TEST(an_abandoned_stream_quantises_again)
{
    const rig_t rig = make_rig(NBYTES);
    wsync_error_t err = {0};
    scene_t scene;

    scene_init(&scene, rig.base);
    CHECK_OK(wsync_stream_wait(rig.stream, (wsync_event_t){rig.control, 0}, 1, &err), err);
    CHECK_OK(quantise(rig.stream, &scene, WSYNC_QUANTISE_CODES, &err), err);
    CHECK(wsync_stream_abandon(rig.stream, PATIENT_MS));
    reset(&scene);
    run_passes(rig.stream, &scene);
    check_scene(&scene);
    wsync_memory_destroy(scene.memory);
    end_rig(&rig);
}

/* The first launch of a pass is behind a wait when the second one fails. */
TEST(half_a_pass_is_not_left_behind)
{
    const rig_t rig = make_rig(NBYTES);
    wsync_error_t err = {0};
    scene_t scene;

    scene_init(&scene, rig.base);
    run_passes(rig.stream, &scene);
    CHECK_OK(wsync_stream_wait(rig.stream, (wsync_event_t){rig.control, 0}, 1, &err), err);
    fake_fail("cuLaunchKernel", 1, WSYNC_CU_LAUNCH_FAILED);
    CHECK_EQ(quantise(rig.stream, &scene, WSYNC_QUANTISE_CODES, &err), WSYNC_ERR_DEVICE);
    CHECK_HAS(err.message, "quantising on GPU 0");
    fake_fail("*", -1, 0);
    CHECK_EQ(wsync_event_query((wsync_event_t){rig.control, 0}), 1); /* it was given up */
    synchronize(&rig);
    wsync_memory_destroy(scene.memory);
    end_rig(&rig);
}

TEST(weights_whose_memory_is_paused_are_an_error)
{
    wsync_error_t err = {0};
    wsync_memory_t *paused;
    scene_t scene;
    rig_t rig;

    choose_fake("WSYNC_FAKE_CUDA_RESERVED", "1");
    rig = make_rig(NBYTES);
    paused = make_buffer(rig.base, WEIGHTS_NBYTES);
    scene_init(&scene, rig.base);
    fill(reach(paused->data), WEIGHTS_NBYTES, 2);
    scene.sources[1] = span_of(paused);
    for (int round = 0; round < 2; round++) {
        reset(&scene);
        run_passes(rig.stream, &scene);
        CHECK_OK(wsync_memory_park(paused, &err), err);
        CHECK_EQ(quantise(rig.stream, &scene, WSYNC_QUANTISE_CODES, &err), WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "no memory of the GPU lies at");
        CHECK_OK(wsync_memory_unpark(paused, -1, &err), err);
    }
    wsync_memory_destroy(paused);
    wsync_memory_destroy(scene.memory);
    end_rig(&rig);
}

TEST(nothing_is_launched_for_pieces_without_elements)
{
    const rig_t rig = make_rig(NBYTES);
    const wsync_quantise_piece_t empty = {.extent = {0, COLS}};
    wsync_error_t err = {0};
    scene_t scene;

    scene_init(&scene, rig.base);
    scene.batch.pieces = &empty;
    for (scene.batch.count = 0; scene.batch.count < 2; scene.batch.count++) {
        CHECK_OK(quantise(rig.stream, &scene, WSYNC_QUANTISE_AMAXES, &err), err);
        CHECK_OK(quantise(rig.stream, &scene, WSYNC_QUANTISE_CODES, &err), err);
    }
    synchronize(&rig);
    wsync_memory_destroy(scene.memory);
    end_rig(&rig);
}

static wsync_status_t attempt(void *context, wsync_error_t *err)
{
    scene_t *scene = context;
    wsync_stream_t *stream = NULL;
    wsync_error_t ignored = {0};
    wsync_status_t status = wsync_stream_create(scene->memory->device, 1, &stream, err);

    if (status == WSYNC_OK) {
        status = quantise(stream, scene, WSYNC_QUANTISE_AMAXES, err);
    }
    if (status == WSYNC_OK) {
        status = quantise(stream, scene, WSYNC_QUANTISE_CODES, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_synchronize(stream, PATIENT_MS, err);
    } else if (stream != NULL) {
        (void)wsync_stream_synchronize(stream, PATIENT_MS, &ignored);
    }
    wsync_stream_destroy(stream);
    return status;
}

TEST(each_call_fails_in_turn)
{
    scene_t scene;

    scene_init(&scene, gpu());
    CHECK(fail_in_turn(attempt, &scene, WSYNC_CU_LAUNCH_FAILED, 0) > 12);
    reset(&scene);
    CHECK_EQ(attempt(&scene, NULL), WSYNC_OK);
    check_scene(&scene);
    wsync_memory_destroy(scene.memory);
}
