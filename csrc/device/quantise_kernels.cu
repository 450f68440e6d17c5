/* SPDX-License-Identifier: Apache-2.0
 * The kernel that quantises, a part of kernels.cu, of which it has all words.
 *
 * A thread takes units of its own: some columns of a piece, over some rows.  Eight columns
 * of a row are read at a time, which lie together in 16 bytes of half precision, and the
 * threads of a warp take neighbours.  Blocks that are larger than a unit need their
 * extremes first, by a launch of their own: threads meet nowhere but in these entries. */
#include "device/quantise_math.h"
#include "device/quantise_table.h"

enum { OCTET = WSYNC_QUANTISE_OCTET };

#ifdef __CUDACC__
#define QUANTISE_KERNEL                                                \
    extern "C" __global__ void __launch_bounds__(WSYNC_QUANTISE_BLOCK, \
                                                 WSYNC_QUANTISE_BLOCKS_PER_SM)
#define RAISE_SIGNED(at, bits) ((void)atomicMax((int *)(at), (int)(bits)))
#define LOWER_UNSIGNED(at, bits) ((void)atomicMin((unsigned *)(at), bits))
#else
#define QUANTISE_KERNEL KERNEL
/* Its threads run one after another. */
#define RAISE_SIGNED(at, bits) ((void)(*(at) = (bits)))
#define LOWER_UNSIGNED(at, bits) ((void)(*(at) = (bits)))
#endif

/* Weights as they are read: two in a word, or one. */
typedef struct octet {
    unsigned word[OCTET];
} octet_t;

typedef struct extremes {
    float high;
    float low;
} extremes_t;

/* What a block's elements are encoded with. */
typedef struct factor {
    float value;
    float zero; /* its zero point */
} factor_t;

/* A sweep finds extremes or goes by a factor: the same registers are for both. */
typedef union sweep {
    extremes_t found;
    factor_t factor;
} sweep_t;

/* Octets of one block: below each other, or of one row.  The first `full` ones are read and
 * written as a whole. */
typedef struct run {
    const u8_t *source;
    u8_t *codes;
    int advance; /* bytes from octet to octet */
    int step;    /* and from column to column */
    unsigned codes_advance;
    unsigned octets;
    unsigned full;
    unsigned count; /* columns of all octets but the last */
    unsigned last;
    unsigned weight;
} run_t;

/* Where an entry's words may be raised by others meanwhile: not out of the first-level
 * cache.
 */
DEVICE unsigned load_entry(const u32_t *at)
{
    unsigned bits;

#ifdef __CUDACC__
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(at));
#else
    bits = *at;
#endif
    return bits;
}

/* The larger one; a NaN is above all. */
DEVICE float larger(float a, float b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float value;

    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
#else
    return b > a || wsync_is_nan(b) ? b : a;
#endif
}

DEVICE extremes_t merge_extremes(extremes_t a, extremes_t b)
{
    extremes_t both;

    both.high = larger(a.high, b.high);
    both.low = larger(a.low, b.low);
    return both;
}

DEVICE extremes_t no_extremes(void)
{
    extremes_t none;

    none.high = wsync_float(WSYNC_INFINITY_BITS | 0x80000000U);
    none.low = none.high;
    return none;
}

/* Raises one word of an entry.  As signed numbers floats that are not negative are ordered
 * as they are, with NaN above; as unsigned ones those that are negative are, the other way
 * round and beyond the others.  So a word of all ones is below everything. */
DEVICE void raise_word(u32_t *at, float value)
{
    const unsigned bits = wsync_is_nan(value) ? WSYNC_NAN_BITS
                          : value == 0.0F     ? 0U
                                              : wsync_bits(value);
    const unsigned seen = load_entry(at);

    /* A look is cheaper than to raise what is higher already. */
    if ((bits & 0x80000000U) == 0) {
        if ((int)bits > (int)seen) {
            RAISE_SIGNED(at, bits);
        }
    } else if (bits < seen) {
        LOWER_UNSIGNED(at, bits);
    }
}

DEVICE void raise_entry(u32_t *entries, unsigned long long index, extremes_t found)
{
    raise_word(entries + 2 * index, found.high);
    raise_word(entries + 2 * index + 1, found.low);
}

DEVICE extremes_t read_entry(const u32_t *entries, unsigned long long index)
{
    extremes_t found;

    found.high = wsync_float(TABLE(entries[2 * index]));
    found.low = wsync_float(TABLE(entries[2 * index + 1]));
    return found;
}

DEVICE float amax_of(extremes_t found)
{
    return wsync_extremes_amax(found.high, found.low);
}

/* --- eight columns --- */

DEVICE octet_t load_octet(const run_t *run, const u8_t *from)
{
    const vec16_t low = LOAD_PLAIN(vec16_t, from);
    vec16_t high = low;
    octet_t raw;

    if (run->weight == WSYNC_WEIGHT_F32) {
        high = LOAD_PLAIN(vec16_t, from + 16);
    }
    raw.word[0] = low.x;
    raw.word[1] = low.y;
    raw.word[2] = low.z;
    raw.word[3] = low.w;
    raw.word[4] = high.x;
    raw.word[5] = high.y;
    raw.word[6] = high.z;
    raw.word[7] = high.w;
    return raw;
}

/* One by one; columns that are not there are as the last one. */
DEVICE octet_t gather_octet(const run_t *run, const u8_t *from, unsigned count)
{
    octet_t raw;

    UNROLL for (unsigned i = 0; i < OCTET; i++) {
        if (run->weight == WSYNC_WEIGHT_F32) {
            raw.word[i] = LOAD_PLAIN(u32_t, from);
        } else if (i % 2 == 0) {
            raw.word[i / 2] = LOAD_PLAIN(u16_t, from);
        } else {
            raw.word[i / 2] |= (unsigned)LOAD_PLAIN(u16_t, from) << 16;
        }
        from += i + 1 < count ? run->step : 0;
    }
    return raw;
}

DEVICE unsigned count_of(const run_t *run, unsigned index)
{
    return index + 1 < run->octets ? run->count : run->last;
}

DEVICE octet_t read_octet(const run_t *run, unsigned index)
{
    const u8_t *from = run->source + (long long)index * run->advance;

    return index < run->full ? load_octet(run, from)
                             : gather_octet(run, from, count_of(run, index));
}

DEVICE unsigned half_of(const octet_t *raw, unsigned index)
{
    return index % 2 == 0 ? raw->word[index / 2] & 0xffffU : raw->word[index / 2] >> 16;
}

DEVICE void widen_octet(unsigned weight, const octet_t *raw, float *value)
{
    if (weight == WSYNC_WEIGHT_F32) {
        UNROLL for (unsigned i = 0; i < OCTET; i++) {
            value[i] = wsync_weight_value(WSYNC_WEIGHT_F32, raw->word[i]);
        }
    } else if (weight == WSYNC_WEIGHT_BF16) {
        UNROLL for (unsigned i = 0; i < OCTET; i++) {
            value[i] = wsync_weight_value(WSYNC_WEIGHT_BF16, half_of(raw, i));
        }
    } else {
        UNROLL for (unsigned i = 0; i < OCTET; i++) {
            value[i] = wsync_weight_value(WSYNC_WEIGHT_F16, half_of(raw, i));
        }
    }
}

/* The codes of eight columns: bytes of two words, or four bits of one. */
typedef struct codes {
    unsigned low;
    unsigned high;
} codes_t;

#define ENCODE_CASE(encoding)                                                     \
    case encoding:                                                                \
        UNROLL for (unsigned i = 0; i < OCTET; i++) {  \
            code[i] =                                                             \
                wsync_quantise_element(encoding, weight, value[i], factor.value); \
        }                                                                         \
        break

DEVICE codes_t encode_octet(unsigned encoding, unsigned weight, const float *value,
                            factor_t factor)
{
    unsigned code[OCTET];
    codes_t codes;

    switch (encoding) {
        ENCODE_CASE(WSYNC_ENCODING_E4M3_MULTIPLY);
        ENCODE_CASE(WSYNC_ENCODING_E4M3_DIVIDE);
        ENCODE_CASE(WSYNC_ENCODING_E4M3_DIVIDE_ROUND);
        ENCODE_CASE(WSYNC_ENCODING_INT4_DIVIDE);
        ENCODE_CASE(WSYNC_ENCODING_INT4_DIVIDE_ROUND);
    case WSYNC_ENCODING_INT4_ZERO:
        UNROLL for (unsigned i = 0; i < OCTET; i++) {
            code[i] = wsync_zero_element(weight, value[i], factor.value, factor.zero);
        }
        break;
    default:
        UNROLL for (unsigned i = 0; i < OCTET; i++) {
            code[i] = wsync_quantise_element(WSYNC_ENCODING_E2M1_MULTIPLY, weight, value[i],
                                             factor.value);
        }
        break;
    }
    if (encoding <= WSYNC_ENCODING_E4M3_DIVIDE_ROUND) {
        codes.low = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
        codes.high = code[4] | code[5] << 8 | code[6] << 16 | code[7] << 24;
    } else {
        codes.low = code[0] | code[1] << 4 | code[2] << 8 | code[3] << 12 | code[4] << 16 |
                    code[5] << 20 | code[6] << 24 | code[7] << 28;
        codes.high = 0;
    }
    return codes;
}

/* `bits` of a code; a word of 4 bits has 8 codes or 2. */
DEVICE void store_octet(const run_t *run, unsigned index, codes_t codes,
                        const wsync_quantise_task_t *task)
{
    u8_t *to = run->codes + (unsigned long long)index * run->codes_advance;
    const unsigned bits = TABLE(task->code_bits);

    if (index >= run->full) {
        const unsigned count = count_of(run, index);
        const unsigned word = TABLE(task->word_nbytes);
        const unsigned nbytes = ((count * bits + 7) / 8 + word - 1) / word * word;

        /* Of the last word, what is beyond the tensor's columns is 0. */
        if (bits == 4 && count < OCTET) {
            codes.low &= (1U << (4 * count)) - 1;
        }
        NO_UNROLL for (unsigned i = 0; i < nbytes; i++) {
            to[i] = (u8_t)codes.low;
            codes.low = codes.low >> 8 | codes.high << 24;
            codes.high >>= 8;
        }
    } else if (bits == 8) {
        vec8_t both;

        both.x = codes.low;
        both.y = codes.high;
        *(vec8_t *)(void *)to = both;
    } else {
        *(u32_t *)(void *)to = codes.low;
    }
}

/* Finds the extremes of a run, or writes its codes.  An octet is on its way while the one
 * before is worked on. */
DEVICE void sweep_run(const run_t *run, const wsync_quantise_task_t *task, unsigned writes,
                      sweep_t *sweep)
{
    const unsigned encoding = wsync_encoding_of(TABLE(task->kind), TABLE(task->reciprocal));
    octet_t next = {{0}};

    NO_UNROLL for (unsigned k = 0; k <= run->octets; k++) {
        const octet_t raw = next;
        float value[OCTET];

        if (k < run->octets) {
            next = read_octet(run, k);
        }
        if (k == 0) {
            continue;
        }
        widen_octet(run->weight, &raw, value);
        if (writes != 0) {
            store_octet(run, k - 1,
                        encode_octet(encoding, run->weight, value, sweep->factor), task);
        } else {
            UNROLL for (unsigned i = 0; i < OCTET; i++) {
                sweep->found.high = larger(sweep->found.high, value[i]);
                sweep->found.low = larger(sweep->found.low, -value[i]);
            }
        }
    }
}

/* --- units --- */

/* Rows and columns of a piece that lie in one block. */
typedef struct place {
    unsigned row;
    unsigned rows;
    unsigned column;
    unsigned columns; /* at most an octet, unless it is one row */
    unsigned block_row;
    unsigned block_col;
    unsigned owns;   /* its block's scale is its own to store */
    unsigned begins; /* its columns are the first that the piece has of their block */
    unsigned first;  /* it has the piece's first element */
} place_t;

DEVICE run_t make_run(const wsync_quantise_args_t *args, const wsync_quantise_task_t *task,
                      const place_t *place)
{
    const unsigned long long *sources = (const unsigned long long *)GLOBAL(args->sources);
    const unsigned code_bits = TABLE(task->code_bits);
    const unsigned octets = (place->columns + OCTET - 1) / OCTET;
    run_t run;

    run.weight = TABLE(task->weight);
    run.advance = TABLE(task->source_stride[0]);
    run.step = TABLE(task->source_stride[1]);
    run.codes_advance = TABLE(task->codes_stride);
    run.source = (const u8_t *)GLOBAL(TABLE(sources[TABLE(task->source_buffer)])) +
                 TABLE(task->source_offset) + (long long)place->row * run.advance +
                 (long long)place->column * run.step;
    run.codes = (u8_t *)GLOBAL(args->image) + TABLE(task->codes) +
                (unsigned long long)place->row * run.codes_advance +
                (unsigned long long)place->column * code_bits / 8;
    run.octets = place->rows;
    run.count = place->columns;
    run.last = place->columns;
    if (octets > 1) {
        run.octets = octets;
        run.count = OCTET;
        run.last -= (octets - 1) * OCTET;
        run.advance = OCTET * run.step;
        run.codes_advance = code_bits;
    }
    run.full = 0;
    if (((low_bits(run.source) | (unsigned)run.advance) & 15U) == 0 &&
        ((low_bits(run.codes) | run.codes_advance) & (code_bits - 1)) == 0 &&
        run.step == (int)TABLE(task->item_nbytes) && run.count == OCTET) {
        run.full = run.octets - (run.last < OCTET);
    }
    return run;
}

DEVICE unsigned long long entry_of(const wsync_quantise_task_t *task, const place_t *place)
{
    return TABLE(task->entry) + place->block_row * TABLE(task->entry_stride) +
           place->block_col;
}

DEVICE unsigned lesser(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

/* Stores the word that a block is the piece's first of: of scales in the rows of the place,
 * or of zero points.  What of it the piece does not hold is among the entries. */
DEVICE void store_words(const wsync_quantise_args_t *args, const u32_t *table,
                        const wsync_quantise_task_t *task, const place_t *place)
{
    const unsigned in_word = TABLE(task->in_word);
    const unsigned zeros = TABLE(task->zeros);
    const unsigned block = zeros != 0 ? place->block_row : place->block_col;
    const unsigned index = TABLE(task->phase) + block;
    const unsigned first = index / in_word * in_word;
    const unsigned end = lesser(first + in_word, TABLE(task->grid));
    const unsigned long long step = zeros != 0 ? TABLE(task->entry_stride) : 1;
    const unsigned long long entry = entry_of(task, place) - (index - first) * step;
    const unsigned row = zeros != 0 ? first / in_word : place->row;
    const unsigned col = zeros != 0 ? place->block_col : first / in_word;
    u8_t *to = (u8_t *)GLOBAL(args->image) + TABLE(task->words) +
               row * TABLE(task->words_stride) + (unsigned long long)col * 4;
    unsigned word = 0;

    if (block > 0 && index != first) {
        return;
    }
    NO_UNROLL for (unsigned i = first; i < end; i++) {
        const extremes_t known = read_entry(table, entry + (i - first) * step);
        const unsigned weight = TABLE(task->weight);
        const unsigned part =
            zeros != 0
                ? wsync_zero_point(weight, known.high, known.low)
                : wsync_quantise_block(TABLE(task->kind), 0, weight, amax_of(known), 0.0F)
                      .bits;

        word |= part << (32 / in_word * (i - first));
    }
    NO_UNROLL for (unsigned i = 0; i < place->rows; i++) {
        store_item(to, word, 4);
        to += TABLE(task->words_stride);
    }
}

/* The factor of a block, whose scale is stored by whoever has its first element. */
DEVICE factor_t block_factor(const wsync_quantise_args_t *args,
                             const wsync_quantise_task_t *task, const place_t *place,
                             extremes_t found)
{
    const unsigned kind = TABLE(task->kind);
    const unsigned weight = TABLE(task->weight);
    u8_t *image = (u8_t *)GLOBAL(args->image);
    float overall = 0.0F;
    wsync_block_scale_t scale;
    factor_t factor;

    if (kind == WSYNC_QUANTISER_NVFP4) {
        overall =
            amax_of(read_entry((const u32_t *)GLOBAL(args->table), TABLE(task->overall)));
        if (place->first != 0 && TABLE(task->second) != WSYNC_QUANTISE_NOWHERE) {
            store_item(image + TABLE(task->second), wsync_nvfp4_second(overall), 4);
        }
    }
    factor.zero = 0.0F;
    if (TABLE(task->zeros) != 0) {
        scale = wsync_zero_scale(weight, found.high, found.low);
        factor.zero = (float)wsync_zero_point(weight, found.high, found.low) - 8.0F;
    } else {
        scale = wsync_quantise_block(kind, TABLE(task->reciprocal), weight, amax_of(found),
                                     overall);
    }
    factor.value = scale.factor;
    if (place->owns != 0 && (TABLE(task->in_word) == 1 || TABLE(task->zeros) != 0)) {
        const unsigned nbytes = TABLE(task->scale_nbytes);

        store_item(image + TABLE(task->scales) +
                       place->block_row * TABLE(task->scales_stride) +
                       (unsigned long long)place->block_col * nbytes,
                   scale.bits, nbytes);
    }
    return factor;
}

/* Cuts one dimension: strip number `index` of blocks of `block`, each of `strips` strips of
 * `width`, of which the first block begins `offset` before the piece.  Whether the strip
 * begins where its block does, or the piece. */
DEVICE unsigned cut(const wsync_quantise_cut_t *dim, unsigned index, unsigned *block,
                    unsigned *begin, unsigned *count)
{
    const unsigned size = TABLE(dim->block);
    const unsigned width = TABLE(dim->width);
    const unsigned offset = TABLE(dim->offset);
    unsigned within;
    unsigned low;
    unsigned high;

    *block = divide(index, &dim->strips);
    within = (index - *block * TABLE(dim->strips.value)) * width;
    low = *block * size + within;
    high = lesser(lesser(low + width, (*block + 1) * size), offset + TABLE(dim->extent));
    low = low < offset ? offset : low;
    *begin = low - offset;
    *count = high > low ? high - low : 0;
    return within == 0 || low == offset;
}

/* Unit number `index` of a piece. */
DEVICE void run_unit(const wsync_quantise_args_t *args, const wsync_quantise_task_t *task,
                     unsigned index)
{
    const unsigned row = divide(index, &task->columns);
    const unsigned entries = TABLE(task->entries);
    const unsigned codes = args->mode == WSYNC_QUANTISE_MODE_CODES;
    const unsigned known = codes != 0 && entries != WSYNC_QUANTISE_ENTRIES_LOCAL;
    u32_t *table = (u32_t *)GLOBAL(entries == WSYNC_QUANTISE_ENTRIES_SCRATCH ? args->scratch
                                                                             : args->table);
    sweep_t sweep;
    place_t place;
    run_t run;

    place.begins = cut(&task->dims[1], index - row * TABLE(task->columns.value),
                       &place.block_col, &place.column, &place.columns);
    place.owns =
        cut(&task->dims[0], row, &place.block_row, &place.row, &place.rows) & place.begins;
    place.first = place.row == 0 && place.column == 0;
    if (place.rows == 0 || place.columns == 0) {
        return;
    }
    run = make_run(args, task, &place);
    sweep.found = no_extremes();
    NO_UNROLL for (unsigned writes = known; writes <= codes; writes++) {
        if (writes != 0) {
            sweep.factor = block_factor(
                args, task, &place,
                known != 0 ? read_entry(table, entry_of(task, &place)) : sweep.found);
            if (TABLE(task->in_word) > 1 && place.begins != 0) {
                store_words(args, table, task, &place);
            }
        }
        sweep_run(&run, task, writes, &sweep);
    }
    if (codes == 0 && entries == args->mode) {
        raise_entry(table, entry_of(task, &place), sweep.found);
    }
    if (args->mode == WSYNC_QUANTISE_MODE_TABLE &&
        TABLE(task->overall) != WSYNC_QUANTISE_NOWHERE) {
        raise_entry((u32_t *)GLOBAL(args->table), TABLE(task->overall), sweep.found);
    }
}

QUANTISE_KERNEL wsync_quantise(wsync_quantise_args_t args)
{
    const wsync_quantise_task_t *tasks = (const wsync_quantise_task_t *)GLOBAL(args.tasks);
    const unsigned *unit_starts = (const unsigned *)GLOBAL(args.unit_starts);
    const unsigned threads = gridDim.x * blockDim.x;
    const unsigned end = TABLE(unit_starts[args.first + args.count]);
    unsigned at = args.first;
    unsigned unit = TABLE(unit_starts[args.first]) + blockIdx.x * blockDim.x + threadIdx.x;

    for (; unit < end; unit += threads) {
        if (unit >= TABLE(unit_starts[at + 1])) {
            at = find_segment(unit_starts, unit, at, args.first + args.count);
        }
        run_unit(&args, &tasks[at], unit - TABLE(unit_starts[at]));
    }
}
