/* SPDX-License-Identifier: Apache-2.0 */
#include "device/kernel_quantise.h"

#include <inttypes.h>
#include <stdlib.h>

#include "core/base/divide.h"
#include "core/layout/dtype.h"
#include "core/quantise/piece_check.h"
#include "device/kernel_segments.h"
#include "device/quantise_math.h"

_Static_assert(WSYNC_QUANTISE_NOWHERE == WSYNC_QUANTISE_NONE, "the kernel has another");

/* The kernel counts rows and columns in 30 bits, threads in 31. */
static const uint64_t extent_limit = (uint64_t)1 << 30;
static const uint64_t thread_limit = (uint64_t)1 << 31;

/* What a task is for, in the order of the table: those of each mode follow one another. */
typedef enum purpose {
    OVERALL, /* amaxes of a piece as a whole, in MODE_TABLE */
    TABLE,   /* MODE_TABLE, then MODE_CODES */
    SCRATCH, /* MODE_SCRATCH, then MODE_CODES */
    LOCAL,   /* MODE_CODES */
    PURPOSE_COUNT,
} purpose_t;

void wsync_quantise_tasks_fini(wsync_quantise_tasks_t *tasks)
{
    free(tasks->items);
    free(tasks->thread_starts);
    *tasks = (wsync_quantise_tasks_t){0};
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t block_of(const wsync_quantise_piece_t *piece, int d)
{
    return d == 0 ? piece->method.block_rows : piece->method.block_cols;
}

static uint64_t block_count(const wsync_quantise_piece_t *piece, int d)
{
    return (d == 0 ? wsync_quantise_rows(piece) : wsync_quantise_cols(piece)).count;
}

/* Rows or columns of a block, or of what the piece has of its only one. */
static uint64_t block_extent(const wsync_quantise_piece_t *piece, int d)
{
    return block_count(piece, d) > 1 ? block_of(piece, d) : piece->extent[d];
}

/* Whether the threads of one unit see all of every block, and of the words that it is in.
 */
static bool is_local(const wsync_quantise_piece_t *piece)
{
    return piece->amaxes == WSYNC_QUANTISE_NONE &&
           wsync_quantise_scales_in_word(piece->method.kind) == 1 &&
           block_extent(piece, 0) == 1 &&
           block_extent(piece, 1) <= WSYNC_QUANTISE_LOCAL_COLS;
}

/* Whether a piece has a task for this. */
static bool is_for(const wsync_quantise_piece_t *piece, purpose_t purpose)
{
    const bool has_entries = piece->amaxes != WSYNC_QUANTISE_NONE;

    if (wsync_quantise_empty(piece)) {
        return false;
    }
    switch (purpose) {
    case OVERALL:
        return !has_entries && piece->overall != WSYNC_QUANTISE_NONE;
    case TABLE:
        return has_entries;
    case SCRATCH:
        return !has_entries && !is_local(piece);
    default:
        return is_local(piece);
    }
}

static unsigned char weight_of(wsync_dtype_t dtype)
{
    return dtype == WSYNC_DTYPE_BFLOAT16  ? WSYNC_WEIGHT_BF16
           : dtype == WSYNC_DTYPE_FLOAT16 ? WSYNC_WEIGHT_F16
                                          : WSYNC_WEIGHT_F32;
}

static wsync_status_t check_size(const wsync_quantise_piece_t *piece, wsync_error_t *err)
{
    for (int d = 0; d < 2; d++) {
        const int64_t limit = d == 0 ? INT32_MAX : INT32_MAX / WSYNC_QUANTISE_OCTET;
        const int64_t stride = piece->source_stride[d];

        if (piece->extent[d] >= extent_limit || block_extent(piece, d) >= extent_limit ||
            (piece->extent[d] > 1 && (stride > limit || stride < -limit))) {
            return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_stream_quantise",
                              "%.256s: dim %d: extent %" PRIu64 ", stride %" PRId64
                              " or blocks of %" PRIu64 " are too large for the kernel",
                              piece->tensor, d, piece->extent[d], stride,
                              block_of(piece, d));
        }
    }
    if (piece->extent[0] > 1 && piece->codes_stride > UINT32_MAX) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_stream_quantise",
                          "%.256s: rows of codes that are %" PRIu64
                          " bytes apart are too far apart for the kernel",
                          piece->tensor, piece->codes_stride);
    }
    return WSYNC_OK;
}

/* Whether a thread takes two blocks of a row at a time. */
static bool has_halves(const wsync_quantise_piece_t *piece, purpose_t purpose)
{
    const uint64_t half = (uint64_t)WSYNC_QUANTISE_BATCH * WSYNC_QUANTISE_OCTET / 2;

    return purpose == LOCAL && block_count(piece, 1) > 1 && block_of(piece, 1) == half;
}

/* Cuts a dimension into strips; returns how many there are in all.  Rows that are blocks
 * are cut as one block. */
static uint64_t cut(const wsync_quantise_piece_t *piece, int d, purpose_t purpose,
                    wsync_quantise_cut_t *dim)
{
    const bool local = purpose == LOCAL;
    const bool whole =
        purpose == OVERALL || block_count(piece, d) == 1 || (local && d == 0);
    const uint64_t blocks = d == 1 && has_halves(piece, purpose) ? 2 : 1;
    const uint64_t block = whole ? piece->extent[d] : blocks * block_of(piece, d);
    const uint64_t rows = local ? WSYNC_QUANTISE_LOCAL_ROWS : WSYNC_QUANTISE_UNIT_ROWS;
    const uint64_t columns = local ? WSYNC_QUANTISE_LOCAL_COLS : WSYNC_QUANTISE_OCTET;
    const uint64_t width = least(block, d == 0 ? rows : columns);
    const uint64_t strips = wsync_ceil_divide(block, width);

    *dim = (wsync_quantise_cut_t){
        .extent = (unsigned)piece->extent[d],
        .block = (unsigned)block,
        .offset = whole ? 0 : (unsigned)(piece->start[d] % block_of(piece, d)),
        .width = (unsigned)width,
        .strips = wsync_divisor((uint32_t)strips),
    };
    return (whole ? 1 : wsync_ceil_divide(block_count(piece, d), blocks)) * strips;
}

/* How many threads take a batch each of a block's row. */
static unsigned lanes_for(const wsync_quantise_task_t *task, purpose_t purpose)
{
    const unsigned batch = WSYNC_QUANTISE_BATCH * WSYNC_QUANTISE_OCTET;
    unsigned lanes = 1;

    while (purpose == LOCAL && lanes * batch < task->dims[1].width) {
        lanes *= 2;
    }
    return lanes;
}

/* Where the entry of the piece's first block is; scratch entries are given out. */
static void place_entries(const wsync_quantise_piece_t *piece, purpose_t purpose,
                          uint64_t *scratch_count, wsync_quantise_task_t *task)
{
    task->entries = WSYNC_QUANTISE_ENTRIES_LOCAL;
    if (purpose == TABLE) {
        task->entries = WSYNC_QUANTISE_ENTRIES_TABLE;
        task->entry = piece->amaxes +
                      wsync_quantise_rows(piece).first * piece->amax_stride +
                      wsync_quantise_cols(piece).first;
        task->entry_stride = piece->amax_stride;
    } else if (purpose == SCRATCH) {
        task->entries = WSYNC_QUANTISE_ENTRIES_SCRATCH;
        task->entry = *scratch_count;
        task->entry_stride = block_count(piece, 1);
        *scratch_count += block_count(piece, 0) * block_count(piece, 1);
    }
}

/* Which blocks of a row share words, and where these are. */
static void place_words(const wsync_quantise_piece_t *piece, wsync_quantise_task_t *task)
{
    const unsigned in_word = wsync_quantise_scales_in_word(piece->method.kind);
    const uint64_t first = wsync_quantise_cols(piece).first;

    task->in_word = (unsigned char)in_word;
    if (in_word > 1) {
        task->phase = (unsigned)(first % in_word);
        task->grid = (unsigned)least(piece->grid[1] - (first - task->phase), UINT32_MAX);
    }
}

static wsync_status_t append(wsync_quantise_tasks_t *tasks,
                             const wsync_quantise_piece_t *piece, purpose_t purpose,
                             wsync_error_t *err)
{
    const wsync_quantise_kind_t kind = piece->method.kind;
    const unsigned codes = wsync_quantise_codes(kind);
    const size_t word = wsync_dtype_nbytes(wsync_quantise_word(kind));
    const uint64_t begin = tasks->thread_starts[tasks->count];
    wsync_quantise_task_t task = {
        .source_offset = piece->source_offset,
        .codes = piece->codes,
        .scales = piece->scales,
        .scales_stride = piece->scales_stride,
        .overall = piece->overall,
        .second = piece->second,
        .source_buffer = piece->source_buffer,
        .kind = (unsigned char)kind,
        .reciprocal = piece->method.reciprocal,
        .weight = weight_of(piece->dtype),
        .item_nbytes = (unsigned char)wsync_dtype_nbytes(piece->dtype),
        .scale_nbytes =
            (unsigned char)wsync_dtype_nbytes(wsync_quantise_scale(kind, piece->dtype)),
        .code_bits = (unsigned char)(8 * word / codes),
        .word_nbytes = (unsigned char)word,
    };
    uint64_t rows;
    uint64_t columns;
    uint64_t threads;
    const wsync_status_t status = check_size(piece, err);

    if (status != WSYNC_OK) {
        return status;
    }
    for (int d = 0; d < 2; d++) {
        task.source_stride[d] = piece->extent[d] > 1 ? (int)piece->source_stride[d] : 0;
    }
    task.codes_stride = piece->extent[0] > 1 ? (unsigned)piece->codes_stride : 0;
    rows = cut(piece, 0, purpose, &task.dims[0]);
    columns = cut(piece, 1, purpose, &task.dims[1]);
    task.halves = has_halves(piece, purpose);
    task.lanes = (unsigned char)lanes_for(&task, purpose);
    task.lane_bits = (unsigned char)__builtin_ctz(task.lanes);
    if (__builtin_mul_overflow(rows, columns, &threads) ||
        __builtin_mul_overflow(threads, task.lanes, &threads) ||
        threads > thread_limit - begin - WSYNC_KERNEL_WARP) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_stream_quantise",
                          "%.256s: quantising %" PRIu64 " x %" PRIu64
                          " elements needs too many GPU threads beside %" PRIu64
                          " others: 2^31 are possible",
                          piece->tensor, piece->extent[0], piece->extent[1], begin);
    }
    task.columns = wsync_divisor((uint32_t)columns);
    place_entries(piece, purpose, &tasks->lists.scratch_count, &task);
    place_words(piece, &task);
    tasks->items[tasks->count++] = task;
    threads = wsync_ceil_divide(threads, WSYNC_KERNEL_WARP) * WSYNC_KERNEL_WARP;
    tasks->thread_starts[tasks->count] = (uint32_t)(begin + threads);
    return WSYNC_OK;
}

/* Tasks from `begin` to `end`. */
static wsync_quantise_list_t list_of(const wsync_quantise_tasks_t *tasks, size_t begin,
                                     size_t end)
{
    return (wsync_quantise_list_t){
        .first = (uint32_t)begin,
        .count = (uint32_t)(end - begin),
        .thread_count = tasks->thread_starts[end] - tasks->thread_starts[begin],
    };
}

wsync_status_t wsync_quantise_tasks_init(wsync_quantise_tasks_t *tasks,
                                         const wsync_quantise_piece_t *pieces, size_t count,
                                         wsync_error_t *err)
{
    const size_t room = 2 * count; /* OVERALL, and one of the others */
    size_t begin[PURPOSE_COUNT + 1] = {0};
    wsync_status_t status = WSYNC_OK;

    *tasks = (wsync_quantise_tasks_t){
        .items = calloc(room + 1, sizeof(*tasks->items)),
        .thread_starts = calloc(room + 1, sizeof(*tasks->thread_starts)),
    };
    if (tasks->items == NULL || tasks->thread_starts == NULL) {
        wsync_quantise_tasks_fini(tasks);
        return wsync_no_memory(err, "calloc");
    }
    for (unsigned purpose = 0; purpose < PURPOSE_COUNT; purpose++) {
        for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
            if (is_for(&pieces[i], (purpose_t)purpose)) {
                status = append(tasks, &pieces[i], (purpose_t)purpose, err);
            }
        }
        begin[purpose + 1] = tasks->count;
    }
    if (status != WSYNC_OK) {
        wsync_quantise_tasks_fini(tasks);
        return status;
    }
    tasks->lists.of[WSYNC_QUANTISE_MODE_TABLE] =
        list_of(tasks, begin[OVERALL], begin[SCRATCH]);
    tasks->lists.of[WSYNC_QUANTISE_MODE_SCRATCH] =
        list_of(tasks, begin[SCRATCH], begin[LOCAL]);
    tasks->lists.of[WSYNC_QUANTISE_MODE_CODES] = list_of(tasks, begin[TABLE], tasks->count);
    return WSYNC_OK;
}

uint32_t wsync_quantise_grid(const wsync_quantise_list_t *list)
{
    return (uint32_t)wsync_ceil_divide(list->thread_count, WSYNC_QUANTISE_BLOCK);
}
