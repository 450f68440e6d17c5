/* SPDX-License-Identifier: Apache-2.0
 * The kernel that quantises, a part of kernels.cu, of which it has all words.
 *
 * A thread takes eight columns at a time, an octet, which lie together in 16 bytes of half
 * precision, and has up to four of them under way.  Blocks of one row are small: their
 * threads, up to eight neighbours, find amaxes and write codes in one go, and tell each
 * other what they have found.  Larger blocks need their amaxes first, by a launch of its
 * own, whose threads meet nowhere but in these entries. */
#include "device/quantise_octets.cu"

#ifdef __CUDACC__
#define QUANTISE_KERNEL                                                \
    extern "C" __global__ void __launch_bounds__(WSYNC_QUANTISE_BLOCK, \
                                                 WSYNC_QUANTISE_BLOCKS_PER_SM)
#define RAISE(at, bits) ((void)atomicMax((unsigned *)(at), bits))
#else
#define QUANTISE_KERNEL KERNEL
/* Its threads run one after another. */
#define RAISE(at, bits) ((void)(*(at) = (bits)))
#endif

/* What a thread does of a unit: batches of octets, those of one row of a block or of rows
 * that follow one another. */
typedef struct run {
    const u8_t *source;
    u8_t *codes;
    int step;    /* bytes from column to column */
    int next;    /* from octet to octet of a batch */
    int advance; /* and from batch to batch */
    unsigned codes_next;
    unsigned codes_advance;
    unsigned batches;
    unsigned octets;  /* of each batch that is a row, else of all batches */
    unsigned in_row;  /* of each batch that is a row, else 0 */
    unsigned columns; /* of the last octet of a row, or of each */
    unsigned fast;    /* octets are of bfloat16, and read and written as a whole */
    unsigned wide;    /* and so are the codes of a batch */
    unsigned weight;
} run_t;

/* Where an entry may be raised by others meanwhile: not out of the first-level
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

/* Raises an entry.  The bits of magnitudes are ordered as these are, with NaN above. */
DEVICE void raise_entry(u32_t *entries, unsigned long long index, float amax)
{
    const unsigned bits = wsync_is_nan(amax) ? WSYNC_NAN_BITS : wsync_bits(amax);

    /* A look is cheaper than to raise what is higher already. */
    if (bits > load_entry(entries + index)) {
        RAISE(entries + index, bits);
    }
}

DEVICE float read_entry(const u32_t *entries, unsigned long long index)
{
    return wsync_float(TABLE(entries[index]));
}

/* Columns of an octet. */
DEVICE unsigned columns_of(const run_t *run, unsigned index)
{
    return index + 1 < run->in_row ? OCTET : run->columns;
}

/* --- batches, one by one: any weights, wherever they lie --- */

DEVICE float load_weight(const run_t *run, const u8_t *from)
{
    const unsigned bits =
        run->weight == WSYNC_WEIGHT_F32 ? LOAD_PLAIN(u32_t, from) : LOAD_PLAIN(u16_t, from);

    return wsync_weight_value(run->weight, bits);
}

DEVICE float raise_columns(const run_t *run, const u8_t *at, unsigned count, float found)
{
    NO_UNROLL for (unsigned i = 0; i < count; i++)
    {
        const unsigned bits = wsync_bits(load_weight(run, at));

        found = larger(found, wsync_float(bits & 0x7fffffffU));
        at += run->step;
    }
    return found;
}

/* As raise_batch. */
DEVICE float raise_items(const run_t *run, const u8_t *from, unsigned begin, unsigned end,
                         float found)
{
    NO_UNROLL for (unsigned i = begin; i < end; i++)
    {
        found =
            raise_columns(run, from + (long long)i * run->next, columns_of(run, i), found);
    }
    return found;
}

/* The codes of an octet, the first one's in the lowest bits. */
DEVICE u64_t encode_items(const run_t *run, const wsync_quantise_task_t *task,
                          const u8_t *at, unsigned count, factor_t factor)
{
    const unsigned encoding = wsync_encoding_of(TABLE(task->kind), TABLE(task->reciprocal));
    const unsigned bits = TABLE(task->code_bits);
    u64_t codes = 0;

    NO_UNROLL for (unsigned k = 0; k < count; k++)
    {
        const float value = load_weight(run, at);
        const unsigned code =
            wsync_quantise_element(encoding, run->weight, value, factor.value);

        codes |= (u64_t)code << (bits * k);
        at += run->step;
    }
    return codes;
}

/* Of the last word, what is beyond the tensor's columns is 0. */
DEVICE void write_items(const run_t *run, const wsync_quantise_task_t *task,
                        const u8_t *from, u8_t *to, unsigned count, const factor_t *factor)
{
    const unsigned bits = TABLE(task->code_bits);
    const unsigned word = TABLE(task->word_nbytes);

    NO_UNROLL for (unsigned i = 0; i < count; i++)
    {
        const unsigned columns = columns_of(run, i);
        const unsigned nbytes = ((columns * bits + 7) / 8 + word - 1) / word * word;
        u64_t codes = encode_items(run, task, from + (long long)i * run->next, columns,
                                   i < BATCH / 2 ? factor[0] : factor[1]);

        NO_UNROLL for (unsigned k = 0; k < nbytes; k++)
        {
            to[(unsigned long long)i * run->codes_next + k] = (u8_t)codes;
            codes >>= 8;
        }
    }
}

/* --- batches of bfloat16 as a whole, of blocks that are not out of the ordinary --- */

/* Octets that lie `next` bytes apart; those that are not there are as the last. */
DEVICE void load_batch(const u8_t *from, int next, unsigned count, vec16_t *raw)
{
    UNROLL for (unsigned i = 0; i < BATCH; i++)
    {
        raw[i] = LOAD_PLAIN(vec16_t, from + (long long)lesser(i, count - 1) * next);
    }
}

DEVICE void store_16(u8_t *to, unsigned x, unsigned y, unsigned z, unsigned w)
{
    vec16_t value;

    value.x = x;
    value.y = y;
    value.z = z;
    value.w = w;
    *(vec16_t *)(void *)to = value;
}

/* `bits` of a code. */
DEVICE void store_octet(u8_t *to, codes_t codes, unsigned bits)
{
    if (bits == 8) {
        vec8_t both;

        both.x = codes.low;
        both.y = codes.high;
        *(vec8_t *)(void *)to = both;
    } else {
        *(u32_t *)(void *)to = codes.low;
    }
}

DEVICE void store_batch(const run_t *run, u8_t *to, const codes_t *codes, unsigned count,
                        unsigned bits)
{
    if (run->wide != 0 && bits == 8) {
        store_16(to, codes[0].low, codes[0].high, codes[1].low, codes[1].high);
        store_16(to + 16, codes[2].low, codes[2].high, codes[3].low, codes[3].high);
    } else if (run->wide != 0) {
        store_16(to, codes[0].low, codes[1].low, codes[2].low, codes[3].low);
    } else {
        UNROLL for (unsigned i = 0; i < BATCH; i++)
        {
            if (i < count) {
                store_octet(to + (unsigned long long)i * run->codes_next, codes[i], bits);
            }
        }
    }
}

/* --- places --- */

/* Rows and columns of a piece that lie in one block. */
typedef struct place {
    unsigned row;
    unsigned rows;
    unsigned column;
    unsigned columns;   /* at most an octet, unless rows are blocks */
    unsigned block_row; /* of the first row, if rows are blocks */
    unsigned block_col;
    unsigned owns;   /* its block's scale is its own to store */
    unsigned begins; /* its columns are the first that the piece has of their block */
} place_t;

/* Whether a unit has whole blocks, of a row each. */
DEVICE unsigned blocks_are_rows(const wsync_quantise_args_t *args,
                                const wsync_quantise_task_t *task)
{
    return args->mode == WSYNC_QUANTISE_MODE_CODES &&
           TABLE(task->entries) == WSYNC_QUANTISE_ENTRIES_LOCAL;
}

/* What thread number `lane` of a unit does. */
DEVICE run_t make_run(const wsync_quantise_args_t *args, const wsync_quantise_task_t *task,
                      const place_t *place, unsigned lane)
{
    const unsigned long long *sources = (const unsigned long long *)GLOBAL(args->sources);
    const unsigned bits = TABLE(task->code_bits);
    const unsigned by_row = blocks_are_rows(args, task);
    const unsigned skipped = lesser(lane * BATCH * OCTET, place->columns);
    const unsigned columns = lesser(place->columns - skipped, BATCH * OCTET);
    const int advance = TABLE(task->source_stride[0]);
    const unsigned codes_advance = TABLE(task->codes_stride);
    run_t run;

    run.weight = TABLE(task->weight);
    run.step = TABLE(task->source_stride[1]);
    run.source = (const u8_t *)GLOBAL(TABLE(sources[TABLE(task->source_buffer)])) +
                 TABLE(task->source_offset) + (long long)place->row * advance +
                 (long long)(place->column + skipped) * run.step;
    run.codes = (u8_t *)GLOBAL(args->image) + TABLE(task->codes) +
                (unsigned long long)place->row * codes_advance +
                (unsigned long long)(place->column + skipped) * bits / 8;
    if (by_row != 0) {
        run.batches = place->rows;
        run.octets = (columns + OCTET - 1) / OCTET;
        run.in_row = run.octets;
        run.columns = columns - (run.octets - 1) * OCTET;
        run.next = OCTET * run.step;
        run.advance = advance;
        run.codes_next = bits;
        run.codes_advance = codes_advance;
    } else {
        run.batches = (place->rows + BATCH - 1) / BATCH;
        run.octets = place->rows;
        run.in_row = 0;
        run.columns = columns;
        run.next = advance;
        run.advance = BATCH * advance;
        run.codes_next = codes_advance;
        run.codes_advance = BATCH * codes_advance;
    }
    run.fast = run.weight == WSYNC_WEIGHT_BF16 && place->columns % OCTET == 0 &&
               ((low_bits(run.source) | (unsigned)advance) & 15U) == 0 &&
               ((low_bits(run.codes) | codes_advance) & (bits - 1)) == 0 && run.step == 2;
    run.wide = by_row != 0 && run.octets == BATCH &&
               ((low_bits(run.codes) | codes_advance) & 15U) == 0;
    return run;
}

DEVICE unsigned long long entry_of(const wsync_quantise_task_t *task, const place_t *place)
{
    return TABLE(task->entry) + place->block_row * TABLE(task->entry_stride) +
           place->block_col;
}

/* Stores the word of scales that a block is the piece's first of, in the rows of the place.
 * What of it the piece does not hold is among the entries. */
DEVICE void store_words(const wsync_quantise_args_t *args, const u32_t *table,
                        const wsync_quantise_task_t *task, const place_t *place)
{
    const unsigned in_word = TABLE(task->in_word);
    const unsigned index = TABLE(task->phase) + place->block_col;
    const unsigned first = index / in_word * in_word;
    const unsigned end = lesser(first + in_word, TABLE(task->grid));
    const unsigned long long entry = entry_of(task, place) - (index - first);
    u8_t *to = (u8_t *)GLOBAL(args->image) + TABLE(task->scales) +
               place->row * TABLE(task->scales_stride) +
               (unsigned long long)(first / in_word) * 4;
    const wsync_nvfp4_overall_t none = {0};
    unsigned word = 0;

    if (place->block_col > 0 && index != first) {
        return;
    }
    NO_UNROLL for (unsigned i = first; i < end; i++)
    {
        const float amax = read_entry(table, entry + (i - first));
        const unsigned part =
            wsync_quantise_block(TABLE(task->kind), 0, TABLE(task->weight), amax, &none).bits;

        word |= part << (32 / in_word * (i - first));
    }
    NO_UNROLL for (unsigned i = 0; i < place->rows; i++)
    {
        store_item(to, word, 4);
        to += TABLE(task->scales_stride);
    }
}

/* What all blocks of NVFP4 share; whoever has the piece's first element stores it. */
DEVICE wsync_nvfp4_overall_t overall_of(const wsync_quantise_args_t *args,
                                        const wsync_quantise_task_t *task,
                                        unsigned is_first)
{
    const float amax =
        read_entry((const u32_t *)GLOBAL(args->table), TABLE(task->overall));
    const wsync_nvfp4_overall_t overall = wsync_nvfp4_overall(amax);

    if (is_first != 0 && TABLE(task->second) != WSYNC_QUANTISE_NOWHERE) {
        store_item((u8_t *)GLOBAL(args->image) + TABLE(task->second),
                   wsync_bits(overall.second), 4);
    }
    return overall;
}

/* The factor of a block, and its scale's bits. */
DEVICE factor_t block_factor(const wsync_quantise_task_t *task, unsigned weight,
                             const wsync_nvfp4_overall_t *overall, float amax,
                             unsigned *bits)
{
    const wsync_block_scale_t scale = wsync_quantise_block(
        TABLE(task->kind), TABLE(task->reciprocal), weight, amax, overall);
    factor_t factor;

    factor.value = scale.factor;
    factor.reciprocal = 0.0F;
    if (scale.factor >= WSYNC_QUOTIENT_MIN && scale.factor <= WSYNC_QUOTIENT_MAX) {
        factor.reciprocal = WSYNC_DIVIDE(1.0F, scale.factor);
    }
    *bits = scale.bits;
    return factor;
}

/* Where the scale of a place's first block is. */
DEVICE u8_t *scale_of(const wsync_quantise_args_t *args, const wsync_quantise_task_t *task,
                      const place_t *place)
{
    return (u8_t *)GLOBAL(args->image) + TABLE(task->scales) +
           place->block_row * TABLE(task->scales_stride) +
           (unsigned long long)place->block_col * TABLE(task->scale_nbytes);
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

/* Finds the amax of a unit of a larger block. */
DEVICE float find_amax(const run_t *run)
{
    float found = 0.0F;

    NO_UNROLL for (unsigned i = 0; i < run->batches; i++)
    {
        const u8_t *from = run->source + (long long)i * run->advance;
        const unsigned count = lesser(run->octets - i * BATCH, BATCH);

        if (run->fast != 0) {
            vec16_t raw[BATCH];

            load_batch(from, run->next, count, raw);
            found = raise_batch(raw, 0, BATCH, found);
        } else {
            found = raise_items(run, from, 0, count, found);
        }
    }
    return found;
}

/* Writes the codes of a unit of a larger block. */
DEVICE void write_codes(const run_t *run, const wsync_quantise_task_t *task,
                        factor_t factor)
{
    const unsigned encoding = wsync_encoding_of(TABLE(task->kind), TABLE(task->reciprocal));
    const unsigned fast = run->fast != 0 && factor.reciprocal != 0.0F;
    const factor_t both[2] = {factor, factor};

    NO_UNROLL for (unsigned i = 0; i < run->batches; i++)
    {
        const u8_t *from = run->source + (long long)i * run->advance;
        u8_t *to = run->codes + (unsigned long long)i * run->codes_advance;
        const unsigned count = lesser(run->octets - i * BATCH, BATCH);

        if (fast != 0) {
            codes_t codes[BATCH];
            vec16_t raw[BATCH];

            load_batch(from, run->next, count, raw);
            encode_batch(encoding, raw, both, codes);
            store_batch(run, to, codes, count, TABLE(task->code_bits));
        } else {
            write_items(run, task, from, to, count, both);
        }
    }
}

/* --- blocks that are rows --- */

/* The amaxes of the halves of a batch. */
typedef struct halves {
    float first;
    float second;
} halves_t;

/* A thread's part of a block of several. */
typedef struct part {
    unsigned lane;
    unsigned columns; /* of the whole block */
} part_t;

/* The amax of a block: the largest of those that its threads have found. */
DEVICE float merge_lanes(const run_t *run, const wsync_quantise_task_t *task,
                         const part_t *part, const u8_t *from, float found)
{
    const unsigned lanes = TABLE(task->lanes);
#ifdef __CUDACC__
    const unsigned mask = ((1U << lanes) - 1) << (threadIdx.x % WARP & ~(lanes - 1));

    (void)run, (void)part, (void)from;
    NO_UNROLL for (unsigned step = 1; step < lanes; step *= 2)
    {
        found = larger(found, __shfl_xor_sync(mask, found, step));
    }
#else
    /* Its threads run one after another: each looks at all weights of the block. */
    from -= (long long)lesser(part->lane * BATCH * OCTET, part->columns) * run->step;
    found = raise_columns(run, from, lanes > 1 ? part->columns : 0, found);
#endif
    return found;
}

/* The factors of a row's block, or of its two, whose scales one of its threads stores. */
DEVICE void find_factors(const wsync_quantise_task_t *task, unsigned weight,
                         const halves_t *found, unsigned blocks,
                         const wsync_nvfp4_overall_t *overall, unsigned stores, u8_t *to,
                         factor_t *factor)
{
    NO_UNROLL for (unsigned i = 0; i < blocks; i++)
    {
        unsigned bits;
        const factor_t own = block_factor(task, weight, overall,
                                          i == 0 ? found->first : found->second, &bits);

        factor[0] = i == 0 ? own : factor[0];
        factor[1] = own;
        if (stores != 0) {
            store_item(to, bits, TABLE(task->scale_nbytes));
        }
        to += TABLE(task->scale_nbytes);
    }
}

/* Finds amaxes and writes codes of rows that are blocks: a thread's part of each.  What
 * `fast` is the compiler knows, so that it has one function for bfloat16. */
DEVICE void sweep_rows(const run_t *run, const wsync_quantise_task_t *task,
                       const part_t *part, const wsync_nvfp4_overall_t *overall,
                       u8_t *scale, unsigned fast)
{
    const unsigned weight = fast != 0 ? WSYNC_WEIGHT_BF16 : run->weight;
    const unsigned encoding = wsync_encoding_of(TABLE(task->kind), TABLE(task->reciprocal));
    const unsigned halves = TABLE(task->halves);
    const unsigned count = run->octets;
    const u8_t *from = run->source;
    u8_t *to = run->codes;

    NO_UNROLL for (unsigned i = 0; i < run->batches; i++)
    {
        halves_t found = {0.0F, 0.0F};
        vec16_t raw[BATCH];
        factor_t factor[2];

        if (fast == 0) {
            found.first = raise_items(run, from, 0, lesser(count, BATCH / 2), found.first);
            found.second = raise_items(run, from, BATCH / 2, count, found.second);
        } else if (count > 0) {
            load_batch(from, 2 * OCTET, count, raw);
            found.first = raise_batch(raw, 0, BATCH / 2, found.first);
            /* Where octets are not there, the last one is: that of a second block is its
             * own. */
            found.second = raise_batch(raw, BATCH / 2, BATCH, found.second);
        }
        if (halves == 0) {
            found.first = merge_lanes(run, task, part, from,
                                      larger(found.first, found.second));
        }
        find_factors(task, weight, &found, halves != 0 && count > BATCH / 2 ? 2 : 1,
                     overall, part->lane == 0, scale, factor);
        if (fast != 0 && factor[0].reciprocal != 0.0F && factor[1].reciprocal != 0.0F) {
            codes_t codes[BATCH];

            if (count > 0) {
                encode_batch(encoding, raw, factor, codes);
                store_batch(run, to, codes, count, TABLE(task->code_bits));
            }
        } else {
            write_items(run, task, from, to, count, factor);
        }
        from += run->advance;
        to += run->codes_advance;
        scale += TABLE(task->scales_stride);
    }
}

/* --- units --- */

/* Of larger blocks, whose amaxes are in a table, or will be. */
DEVICE void run_strip(const wsync_quantise_args_t *args, const wsync_quantise_task_t *task,
                      const place_t *place, const wsync_nvfp4_overall_t *overall)
{
    const unsigned entries = TABLE(task->entries);
    const run_t run = make_run(args, task, place, 0);
    u32_t *table = (u32_t *)GLOBAL(entries == WSYNC_QUANTISE_ENTRIES_SCRATCH ? args->scratch
                                                                             : args->table);
    float amax;

    if (args->mode == WSYNC_QUANTISE_MODE_CODES) {
        const unsigned in_word = TABLE(task->in_word);
        unsigned bits;
        factor_t factor;

        amax = read_entry(table, entry_of(task, place));
        factor = block_factor(task, run.weight, overall, amax, &bits);
        if (place->owns != 0 && in_word == 1) {
            store_item(scale_of(args, task, place), bits, TABLE(task->scale_nbytes));
        }
        if (in_word > 1 && place->begins != 0) {
            store_words(args, table, task, place);
        }
        write_codes(&run, task, factor);
        return;
    }
    amax = find_amax(&run);
    if (entries == args->mode) {
        raise_entry(table, entry_of(task, place), amax);
    }
    if (args->mode == WSYNC_QUANTISE_MODE_TABLE &&
        TABLE(task->overall) != WSYNC_QUANTISE_NOWHERE) {
        raise_entry((u32_t *)GLOBAL(args->table), TABLE(task->overall), amax);
    }
}

/* What thread number `lane` does of unit number `index` of a piece. */
DEVICE void run_unit(const wsync_quantise_args_t *args, const wsync_quantise_task_t *task,
                     unsigned index, unsigned lane)
{
    const unsigned row = divide(index, &task->columns);
    wsync_nvfp4_overall_t overall = {0};
    place_t place;

    place.begins = cut(&task->dims[1], index - row * TABLE(task->columns.value),
                       &place.block_col, &place.column, &place.columns);
    place.owns =
        cut(&task->dims[0], row, &place.block_row, &place.row, &place.rows) & place.begins;
    if (place.rows == 0 || place.columns == 0) {
        return;
    }
    if (args->mode == WSYNC_QUANTISE_MODE_CODES &&
        TABLE(task->kind) == WSYNC_QUANTISER_NVFP4) {
        overall = overall_of(args, task, place.row == 0 && place.column == 0);
    }
    if (blocks_are_rows(args, task) != 0) {
        const run_t run = make_run(args, task, &place, lane);
        const part_t part = {lane, place.columns};
        place.block_row = place.row;
        place.block_col <<= TABLE(task->halves);
        if (run.fast != 0) {
            sweep_rows(&run, task, &part, &overall, scale_of(args, task, &place), 1);
        } else {
            sweep_rows(&run, task, &part, &overall, scale_of(args, task, &place), 0);
        }
    } else {
        run_strip(args, task, &place, &overall);
    }
}

QUANTISE_KERNEL wsync_quantise(wsync_quantise_args_t args)
{
    const wsync_quantise_task_t *tasks = (const wsync_quantise_task_t *)GLOBAL(args.tasks);
    const unsigned *starts = (const unsigned *)GLOBAL(args.thread_starts);
    const unsigned end = args.first + args.count;
    const unsigned thread =
        TABLE(starts[args.first]) + blockIdx.x * blockDim.x + threadIdx.x;

    if (thread < TABLE(starts[end])) {
        const unsigned at = find_segment(starts, thread, args.first, end);
        const unsigned index = thread - TABLE(starts[at]);
        const unsigned bits = TABLE(tasks[at].lane_bits);

        run_unit(&args, &tasks[at], index >> bits, index & ((1U << bits) - 1));
    }
}
