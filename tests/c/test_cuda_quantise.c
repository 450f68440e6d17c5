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
