/* SPDX-License-Identifier: Apache-2.0
 * How pieces are cut into parts, and the way through a part: a band of blocks at a time,
 * first its amaxes, then its codes while it is in the second-level cache. */
#define DEVICE static inline
#include "device/host_quantise.h"

#include <string.h>

#include "core/base/divide.h"
#include "core/quantise/piece_check.h"
#include "device/host_copy_rows.h"
#include "device/host_quantise_rows.h"

enum {
    /* A strip is what of a row is done at a time: its buffers stay in the first-level
     * cache. */
    STRIP_NBYTES = WSYNC_ROW_NBYTES,
    STRIP_COUNT = STRIP_NBYTES / 2,
    /* Weights of a part, but for blocks that are larger: half of a second-level cache. */
    PART_NBYTES = 256 * 1024,
    /* Rows whose elements lie apart are put together here. */
    GATHER_NBYTES = 32 * 1024,
    LINE_NBYTES = 64,
    AHEAD_ROWS = 2,
    /* Codes between which a few lines are fetched. */
    CHUNK_COUNT = 512,
    /* Codes that do not fit the caches of one core bypass them. */
    STREAMING_WORK = 4 * 1024 * 1024,
};

/* Buffers whose vectors lie in one line each: others are stored in two steps, and wait to
 * be read again. */
#define ALIGNED _Alignas(LINE_NBYTES)

_Static_assert((int)WSYNC_QUANTISER_FP8_BLOCK == (int)WSYNC_QUANTISE_FP8_BLOCK &&
                   (int)WSYNC_QUANTISER_FP8_UE8M0 == (int)WSYNC_QUANTISE_FP8_UE8M0 &&
                   (int)WSYNC_QUANTISER_FP8_TENSOR == (int)WSYNC_QUANTISE_FP8_TENSOR &&
                   (int)WSYNC_QUANTISER_INT4 == (int)WSYNC_QUANTISE_INT4 &&
                   (int)WSYNC_QUANTISER_INT4_SLIME == (int)WSYNC_QUANTISE_INT4_SLIME &&
                   (int)WSYNC_QUANTISER_MXFP8 == (int)WSYNC_QUANTISE_MXFP8 &&
                   (int)WSYNC_QUANTISER_NVFP4 == (int)WSYNC_QUANTISE_NVFP4 &&
                   (int)WSYNC_QUANTISER_FP8_PACKED == (int)WSYNC_QUANTISE_FP8_PACKED,
               "kernels number the kinds alike");

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static unsigned weight_of(wsync_dtype_t dtype)
{
    return dtype == WSYNC_DTYPE_BFLOAT16  ? WSYNC_WEIGHT_BF16
           : dtype == WSYNC_DTYPE_FLOAT16 ? WSYNC_WEIGHT_F16
                                          : WSYNC_WEIGHT_F32;
}

/* Whether a pass does anything with a piece. */
static bool takes_part(const wsync_quantise_batch_t *batch,
                       const wsync_quantise_piece_t *piece)
{
    return !wsync_quantise_empty(piece) &&
           (batch->pass == WSYNC_QUANTISE_CODES || piece->amaxes != WSYNC_QUANTISE_NONE ||
            piece->overall != WSYNC_QUANTISE_NONE);
}

/* A piece as a grid of parts, cut where blocks begin, counted from the start of the block
 * in which the piece begins.  Sizes are rows and columns of a part. */
typedef struct division {
    uint64_t origin[2];
    uint64_t size[2];
    uint64_t count[2];
    uint64_t part_work;
} division_t;

static division_t divide(const wsync_quantise_batch_t *batch,
                         const wsync_quantise_piece_t *piece)
{
    const uint64_t item = wsync_dtype_nbytes(piece->dtype);
    const bool whole = piece->amaxes == WSYNC_QUANTISE_NONE;
    const uint64_t rows = piece->method.block_rows;
    /* a word of scales is one part's */
    const uint64_t cols = (uint64_t)piece->method.block_cols *
                          wsync_quantise_scales_in_word(piece->method.kind);
    division_t division = {.count = {0, 0}};
    uint64_t *size = division.size;
    uint64_t strip;

    if (!takes_part(batch, piece)) {
        return division;
    }
    /* A block of all rows or columns is cut only where it is known what it holds. */
    size[0] = rows > 0 ? rows : (whole ? piece->extent[0] : 1);
    size[1] = cols > 0 ? cols : (whole ? piece->extent[1] : STRIP_COUNT / 4);
    strip = least(STRIP_NBYTES / item, PART_NBYTES / item / least(size[0], PART_NBYTES));
    if (size[1] < strip) {
        size[1] *= strip / size[1];
    }
    if (size[0] * size[1] < PART_NBYTES / item) {
        size[0] *= PART_NBYTES / item / (size[0] * size[1]);
    }
    for (int d = 0; d < 2; d++) {
        const uint64_t block = d == 0 ? rows : cols;

        division.origin[d] =
            block > 0 ? piece->start[d] - piece->start[d] % block : piece->start[d];
        division.count[d] = wsync_ceil_divide(
            piece->start[d] - division.origin[d] + piece->extent[d], size[d]);
    }
    division.part_work =
        least(size[0], piece->extent[0]) * least(size[1], piece->extent[1]) * item;
    return division;
}

/* One part of a piece while it runs: rows and columns are the piece's own. */
typedef struct part {
    const wsync_quantise_batch_t *batch;
    const wsync_quantise_piece_t *piece;
    const wsync_row_functions_t *functions;
    const unsigned char *source;
    unsigned weight;
    unsigned item;
    bool streaming;
    bool fetched; /* its first band, while codes before it were computed */
    uint64_t begin[2];
    uint64_t end[2];
    uint64_t next[2]; /* where the part begins that is run after it; else the extent */
    /* of the gathered rows; the strip's first column */
    uint64_t gathered_row;
    uint64_t gathered_end;
    uint64_t gathered_column;
    unsigned char gathered[GATHER_NBYTES];
} part_t;

/* A band: the blocks of a part that begin in one row of blocks. */
typedef struct band {
    uint64_t begin; /* rows of the piece */
    uint64_t end;
    uint64_t block_row; /* of the tensor */
    uint64_t block_col; /* the first block of the part */
    uint64_t head;      /* columns that the part has of it */
    size_t width;       /* columns of a block; of all columns, as many as the part has */
    size_t count;       /* blocks */
    bool fetched;
    uint64_t next[2]; /* row and column where what is run after it begins */
} band_t;

/* `count` weights of a row from a column on, lying together. */
static const unsigned char *row_at(part_t *part, uint64_t row, uint64_t column,
                                   uint64_t count)
{
    const int64_t *stride = part->piece->source_stride;
    const unsigned char *from =
        part->source + (int64_t)row * stride[0] + (int64_t)column * stride[1];

    if (stride[1] == (int64_t)part->item || count <= 1) {
        return from;
    }
    if (row >= part->gathered_end || row < part->gathered_row ||
        column != part->gathered_column) {
        const uint64_t room = GATHER_NBYTES / (count * part->item);
        const uint64_t rows = least(room, part->end[0] - row);
        const wsync_host_tile_t tile = {
            .inner_count = count,
            .outer_count = rows,
            .inner_source_stride = stride[1],
            .inner_destination_stride = (int64_t)part->item,
            .outer_source_stride = stride[0],
            .outer_destination_stride = (int64_t)(count * part->item),
        };

        wsync_host_tile_copy(part->gathered, from, &tile, part->item);
        part->gathered_row = row;
        part->gathered_end = row + rows;
        part->gathered_column = column;
    }
    return part->gathered + (row - part->gathered_row) * count * part->item;
}

/* A strip's columns of the part from `at` on, and the blocks that they are in. */
typedef struct strip {
    uint64_t column;
    size_t count;
    size_t head;  /* columns that the strip may have of its first block */
    size_t block; /* its first block, counted from the band's first */
} strip_t;

static strip_t strip_at(const part_t *part, const band_t *band, uint64_t column)
{
    const uint64_t offset = column - part->begin[1];
    strip_t strip = {.column = column,
                     .count = least(STRIP_NBYTES / part->item, part->end[1] - column)};

    if (offset < band->head) {
        strip.head = band->head - offset;
    } else {
        strip.block = 1 + (offset - band->head) / band->width;
        strip.head = band->width - (offset - band->head) % band->width;
    }
    return strip;
}

/* Has weights that are soon read come from memory: of a row from a column on.  Inlined, for
 * gcc drops calls of a function that does nothing else. */
static inline __attribute__((always_inline)) void prefetch(const part_t *part, uint64_t row,
                                                           uint64_t column, uint64_t count)
{
    const wsync_quantise_piece_t *piece = part->piece;
    const unsigned char *from;

    if (piece->source_stride[1] != (int64_t)part->item || row >= piece->extent[0] ||
        column >= piece->extent[1]) {
        return;
    }
    from = part->source + (int64_t)row * piece->source_stride[0] + column * part->item;
    count = least(count, piece->extent[1] - column);
    for (uint64_t i = 0; i < count * part->item; i += LINE_NBYTES) {
        __builtin_prefetch(from + i);
    }
}

/* The largest magnitudes of what the part has of a band's blocks. */
static void read_amaxes(part_t *part, const band_t *band, float *amaxes)
{
    const unsigned wide = wsync_row_width(part->weight);
    ALIGNED int32_t magnitudes[STRIP_COUNT];
    ALIGNED int32_t most[STRIP_NBYTES / sizeof(int32_t)];
    ALIGNED int32_t room[STRIP_NBYTES / sizeof(int32_t)];

    memset(magnitudes, 0, band->count * sizeof(magnitudes[0]));
    for (uint64_t column = part->begin[1]; column < part->end[1];) {
        const strip_t strip = strip_at(part, band, column);
        const void *found = most;

        for (uint64_t row = band->begin; row < band->end; row++) {
            const unsigned char *from = row_at(part, row, column, strip.count);

            if (!band->fetched) {
                prefetch(part, row + AHEAD_ROWS, column, strip.count);
            }
            if (band->end - band->begin == 1) {
                found = from;
            } else {
                part->functions->magnitudes[wide](from, strip.count, row == band->begin,
                                                  most);
            }
        }
        part->functions->largest[wide](found, strip.count, strip.head, band->width, room,
                                       &magnitudes[strip.block]);
        column += strip.count;
    }
    part->functions->amaxes(part->weight, magnitudes, band->count, amaxes);
}

/* Raises a magnitude that other threads raise, too.  Its bits are ordered as it is. */
static void raise_to(uint32_t *entry, float amax)
{
    const uint32_t bits = wsync_is_nan(amax) ? WSYNC_NAN_BITS : wsync_bits(amax);
    uint32_t seen = __atomic_load_n(entry, __ATOMIC_RELAXED);

    while (seen < bits &&
           !__atomic_compare_exchange_n(entry, &seen, bits, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
}

static uint32_t *entry_at(const part_t *part, uint64_t index)
{
    return (uint32_t *)part->batch->amaxes.data + index;
}

static float amax_at(const part_t *part, uint64_t index)
{
    return wsync_float(*entry_at(part, index));
}

static uint64_t band_entry(const part_t *part, const band_t *band)
{
    const wsync_quantise_piece_t *piece = part->piece;

    return piece->amaxes + band->block_row * piece->amax_stride + band->block_col;
}

/* Raises the entries of a band's blocks, and of all. */
static void merge_band(const part_t *part, const band_t *band, const float *amaxes)
{
    const wsync_quantise_piece_t *piece = part->piece;

    for (size_t b = 0; b < band->count; b++) {
        if (piece->amaxes != WSYNC_QUANTISE_NONE) {
            raise_to(entry_at(part, band_entry(part, band) + b), amaxes[b]);
        }
        if (piece->overall != WSYNC_QUANTISE_NONE) {
            raise_to(entry_at(part, piece->overall), amaxes[b]);
        }
    }
}

static unsigned char *image_at(const part_t *part, uint64_t offset)
{
    return (unsigned char *)part->batch->image.data + offset;
}

/* Whether the scales of a band are this part's to store: parts are cut between blocks, but
 * for blocks of all rows or columns. */
static bool owns(const part_t *part, const band_t *band)
{
    const wsync_quantise_method_t *method = &part->piece->method;

    return (method->block_rows > 0 || band->begin == 0) &&
           (method->block_cols > 0 || part->begin[1] == 0);
}

/* Stores `count` scales of `nbytes` each. */
static void store_bits(unsigned char *to, const unsigned *bits, size_t count, size_t nbytes)
{
    uint16_t halves[STRIP_COUNT];

    if (nbytes == 1) {
        for (size_t b = 0; b < count; b++) {
            to[b] = (unsigned char)bits[b];
        }
    } else if (nbytes == 2) {
        for (size_t b = 0; b < count; b++) {
            halves[b] = (uint16_t)bits[b];
        }
        memcpy(to, halves, count * sizeof(halves[0]));
    } else {
        memcpy(to, bits, count * sizeof(bits[0]));
    }
}

/* Stores words of exponents: of the band's blocks, and of neighbours that the table has. */
static void store_words(const part_t *part, const band_t *band, const unsigned *exponents)
{
    const wsync_quantise_piece_t *piece = part->piece;
    const uint64_t in_word = wsync_quantise_scales_in_word(piece->method.kind);
    const uint64_t first = band->block_col - band->block_col % in_word;
    const uint64_t last = band->block_col + band->count - 1;
    const uint64_t end = least(piece->grid[1], last - last % in_word + in_word);
    const uint64_t at = (first / in_word - wsync_quantise_scales(piece).first) * in_word;
    const size_t nbytes = wsync_ceil_divide(end - first, in_word) * in_word;
    unsigned char words[STRIP_COUNT + 8] = {0};

    for (uint64_t col = first; col < end; col++) {
        unsigned exponent;

        if (col >= band->block_col && col <= last) {
            exponent = exponents[col - band->block_col];
        } else {
            const float amax =
                amax_at(part, band_entry(part, band) + col - band->block_col);
            const wsync_nvfp4_overall_t none = {0};

            exponent =
                wsync_quantise_block(piece->method.kind, 0, part->weight, amax, &none).bits;
        }
        words[col - first] = (unsigned char)exponent;
    }
    for (uint64_t row = band->begin; row < band->end; row++) {
        memcpy(image_at(part, piece->scales + row * piece->scales_stride + at), words,
               nbytes);
    }
}

/* Computes the band's scales, stores those that are this part's to store, and returns the
 * factors. */
static void store_scales(const part_t *part, const band_t *band, const float *amaxes,
                         float *factors)
{
    const wsync_quantise_piece_t *piece = part->piece;
    const wsync_quantise_kind_t kind = piece->method.kind;
    const size_t nbytes = wsync_dtype_nbytes(wsync_quantise_scale(kind, piece->dtype));
    wsync_row_method_t method = {kind, piece->method.reciprocal, part->weight, 0};
    ALIGNED unsigned bits[STRIP_COUNT];

    if (kind == WSYNC_QUANTISE_NVFP4) {
        method.overall = amax_at(part, piece->overall);
    }
    part->functions->scales(&method, amaxes, band->count, bits, factors);
    if (wsync_quantise_scales_in_word(kind) > 1) {
        store_words(part, band, bits);
    } else if (owns(part, band)) {
        const uint64_t row = band->block_row - wsync_quantise_rows(piece).first;
        const uint64_t col = band->block_col - wsync_quantise_cols(piece).first;

        store_bits(
            image_at(part, piece->scales + row * piece->scales_stride + col * nbytes), bits,
            band->count, nbytes);
    }
    if (piece->second != WSYNC_QUANTISE_NONE && band->begin == 0 && part->begin[1] == 0) {
        const unsigned second = wsync_bits(wsync_nvfp4_overall(method.overall).second);

        memcpy(image_at(part, piece->second), &second, sizeof(second));
    }
}

/* The codes of a row's strip.  Between them weights of the next band come from memory. */
static void encode(part_t *part, const band_t *band, uint64_t row, const strip_t *strip,
                   const float *factors, unsigned char *codes)
{
    const wsync_quantise_method_t *method = &part->piece->method;
    const unsigned encoding = wsync_encoding_of(method->kind, method->reciprocal);
    const unsigned char *from = row_at(part, row, strip->column, strip->count);
    const uint64_t row_ahead = band->next[0] + row - band->begin;
    const uint64_t ahead = band->next[1] + strip->column - part->begin[1];

    for (size_t i = 0; i < strip->count; i += CHUNK_COUNT) {
        const size_t count = least(CHUNK_COUNT, strip->count - i);

        prefetch(part, row_ahead, ahead + i, count);
        part->functions->codes[encoding][part->weight](from + i * part->item, factors + i,
                                                       count, codes + i);
    }
}

static void store_codes(part_t *part, const band_t *band, const float *factors)
{
    const wsync_quantise_piece_t *piece = part->piece;
    const unsigned codes = wsync_quantise_codes(piece->method.kind);
    const size_t word = wsync_dtype_nbytes(wsync_quantise_word(piece->method.kind));
    ALIGNED float columns[STRIP_COUNT];
    ALIGNED unsigned char buffer[STRIP_COUNT + 8];
    ALIGNED unsigned char packed[STRIP_COUNT];

    for (uint64_t column = part->begin[1]; column < part->end[1];) {
        const strip_t strip = strip_at(part, band, column);
        const size_t nbytes = wsync_ceil_divide(strip.count, codes) * word;

        part->functions->spread(factors + strip.block, strip.count, strip.head, band->width,
                                columns);
        /* what of the last word is beyond the tensor's columns */
        memset(buffer + strip.count, 0, nbytes * codes / word - strip.count);
        for (uint64_t row = band->begin; row < band->end; row++) {
            unsigned char *to = image_at(
                part, piece->codes + row * piece->codes_stride + column / codes * word);

            encode(part, band, row, &strip, columns, buffer);
            if (codes > 1) {
                part->functions->pack(buffer, nbytes, packed);
            }
            wsync_host_row_copy(to, codes > 1 ? packed : buffer, nbytes, part->streaming);
        }
        column += strip.count;
    }
}

static void run_band(part_t *part, const band_t *band)
{
    const bool codes = part->batch->pass == WSYNC_QUANTISE_CODES;
    ALIGNED float amaxes[STRIP_COUNT];
    ALIGNED float factors[STRIP_COUNT];

    if (!codes || part->piece->amaxes == WSYNC_QUANTISE_NONE) {
        read_amaxes(part, band, amaxes);
    } else {
        for (size_t b = 0; b < band->count; b++) {
            amaxes[b] = amax_at(part, band_entry(part, band) + b);
        }
    }
    if (!codes) {
        merge_band(part, band, amaxes);
        return;
    }
    store_scales(part, band, amaxes, factors);
    store_codes(part, band, factors);
}

static void run_part(part_t *part)
{
    const wsync_quantise_piece_t *piece = part->piece;
    const uint64_t rows = piece->method.block_rows;
    const uint64_t cols = piece->method.block_cols;
    const uint64_t first = piece->start[1] + part->begin[1];
    const uint64_t last = piece->start[1] + part->end[1] - 1;
    const uint64_t columns = part->end[1] - part->begin[1];
    band_t band = {.end = part->begin[0], .fetched = part->fetched};

    band.block_col = cols > 0 ? first / cols : 0;
    band.head = least(cols > 0 ? cols - first % cols : columns, columns);
    band.width = cols > 0 ? cols : columns;
    band.count = cols > 0 ? last / cols - band.block_col + 1 : 1;
    while (band.end < part->end[0]) {
        const uint64_t row = piece->start[0] + band.end;

        band.begin = band.end;
        band.block_row = rows > 0 ? row / rows : 0;
        band.end =
            rows > 0 ? least(part->end[0], band.begin + rows - row % rows) : part->end[0];
        band.next[0] = band.end < part->end[0] ? band.end : part->next[0];
        band.next[1] = band.end < part->end[0] ? part->begin[1] : part->next[1];
        run_band(part, &band);
        band.fetched = part->batch->pass == WSYNC_QUANTISE_CODES;
    }
}

/* The row or column, dimension d, where part number `at` of that dimension begins. */
static uint64_t edge(const wsync_quantise_piece_t *piece, const division_t *division, int d,
                     uint64_t at)
{
    const uint64_t offset = division->origin[d] + at * division->size[d];

    return offset > piece->start[d] ? least(offset - piece->start[d], piece->extent[d]) : 0;
}

/* Part number `index` of a piece; `last`: of those that are run one after another. */
static void run_index(part_t *part, const division_t *division, uint64_t index, bool last)
{
    const uint64_t columns = division->count[1];
    const uint64_t at[2] = {index / columns, index % columns};
    const uint64_t next[2] = {(index + 1) / columns, (index + 1) % columns};

    for (int d = 0; d < 2; d++) {
        part->begin[d] = edge(part->piece, division, d, at[d]);
        part->end[d] = edge(part->piece, division, d, at[d] + 1);
        part->next[d] =
            last ? part->piece->extent[d] : edge(part->piece, division, d, next[d]);
    }
    part->gathered_end = 0;
    run_part(part);
}

/* Parts of a piece whose work begins at `start` that begin in [begin, end). */
static void run_parts(const wsync_host_quantise_t *list,
                      const wsync_quantise_piece_t *piece, const division_t *division,
                      const uint64_t range[3])
{
    const uint64_t start = range[0];
    const uint64_t total = division->count[0] * division->count[1];
    const uint64_t from =
        range[1] > start ? wsync_ceil_divide(range[1] - start, division->part_work) : 0;
    const uint64_t to =
        least(total, wsync_ceil_divide(range[2] - start, division->part_work));
    part_t part;

    if (from >= to) {
        return;
    }
    part.batch = &list->batch;
    part.piece = piece;
    part.functions = wsync_row_functions_best();
    part.source = (const unsigned char *)list->batch.sources[piece->source_buffer].data +
                  piece->source_offset;
    part.weight = weight_of(piece->dtype);
    part.item = (unsigned)wsync_dtype_nbytes(piece->dtype);
    part.streaming = list->work > STREAMING_WORK;
    for (uint64_t index = from; index < to; index++) {
        part.fetched = list->batch.pass == WSYNC_QUANTISE_CODES && index > from;
        run_index(&part, division, index, index + 1 == to);
    }
}

wsync_host_quantise_t wsync_host_quantise(const wsync_quantise_batch_t *batch)
{
    wsync_host_quantise_t list = {*batch, 0};

    for (size_t i = 0; i < batch->count; i++) {
        const division_t division = divide(batch, &batch->pieces[i]);

        list.work += division.count[0] * division.count[1] * division.part_work;
    }
    return list;
}

void wsync_host_quantise_run(const wsync_host_quantise_t *list, uint64_t begin,
                             uint64_t end, wsync_host_cursor_t *cursor)
{
    while (cursor->index < list->batch.count && cursor->start < end) {
        const wsync_quantise_piece_t *piece = &list->batch.pieces[cursor->index];
        const division_t division = divide(&list->batch, piece);
        const uint64_t stop =
            cursor->start + division.count[0] * division.count[1] * division.part_work;

        if (stop > begin && stop > cursor->start) {
            run_parts(list, piece, &division,
                      (const uint64_t[3]){cursor->start, begin, end});
        }
        if (stop > end) {
            break; /* the next call begins in this piece */
        }
        cursor->index++;
        cursor->start = stop;
    }
    wsync_host_row_fence();
}
