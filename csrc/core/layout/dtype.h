/* SPDX-License-Identifier: Apache-2.0
 * Element types.  A dtype is identified by its torch name.  It is never derived from a
 * DLPack type code, because several torch types share one. */
#ifndef WSYNC_CORE_LAYOUT_DTYPE_H
#define WSYNC_CORE_LAYOUT_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

#include "core/base/status.h"

/*  C name, torch name, item size in bytes  */
#define WSYNC_DTYPE_MAP(X)                     \
    X(FLOAT64, "float64", 8)                   \
    X(FLOAT32, "float32", 4)                   \
    X(FLOAT16, "float16", 2)                   \
    X(BFLOAT16, "bfloat16", 2)                 \
    X(FLOAT8_E4M3FN, "float8_e4m3fn", 1)       \
    X(FLOAT8_E4M3FNUZ, "float8_e4m3fnuz", 1)   \
    X(FLOAT8_E5M2, "float8_e5m2", 1)           \
    X(FLOAT8_E5M2FNUZ, "float8_e5m2fnuz", 1)   \
    X(FLOAT8_E8M0FNU, "float8_e8m0fnu", 1)     \
    X(FLOAT4_E2M1FN_X2, "float4_e2m1fn_x2", 1) \
    X(INT64, "int64", 8)                       \
    X(INT32, "int32", 4)                       \
    X(INT16, "int16", 2)                       \
    X(INT8, "int8", 1)                         \
    X(UINT64, "uint64", 8)                     \
    X(UINT32, "uint32", 4)                     \
    X(UINT16, "uint16", 2)                     \
    X(UINT8, "uint8", 1)                       \
    X(BOOL, "bool", 1)                         \
    X(COMPLEX64, "complex64", 8)               \
    X(COMPLEX128, "complex128", 16)

typedef enum wsync_dtype {
#define WSYNC_DTYPE_ENUM(name, text, nbytes) WSYNC_DTYPE_##name,
    WSYNC_DTYPE_MAP(WSYNC_DTYPE_ENUM)
#undef WSYNC_DTYPE_ENUM
        WSYNC_DTYPE_COUNT,
} wsync_dtype_t;

/* The conversion that a copy applies to its elements. */
typedef enum wsync_transform {
    WSYNC_TRANSFORM_NONE, /* bytes as they are */
    WSYNC_TRANSFORM_F32_TO_BF16,
    WSYNC_TRANSFORM_F32_TO_F16,
    WSYNC_TRANSFORM_BF16_TO_F32,
    /* of one dtype: only of elements that are computed */
    WSYNC_TRANSFORM_F32,
    WSYNC_TRANSFORM_BF16,
    WSYNC_TRANSFORM_F16,
} wsync_transform_t;

/* What a copy computes of an element x: x * scale + offset in float32, each step rounded,
 * and the result rounded to the source's dtype, which is that of the tensor, and then to
 * the destination's (to nearest, ties to even).  With scale 1 or offset 0 that is what
 * torch computes.  Scale 0: nothing, x stays as it is.  A NaN stays one.
 */
typedef struct wsync_affine {
    float scale;
    float offset;
} wsync_affine_t;

/* Torch name ("bfloat16"); dtype must be a value of the table. */
const char *wsync_dtype_name(wsync_dtype_t dtype);

/* Bytes of one element. */
size_t wsync_dtype_nbytes(wsync_dtype_t dtype);

/* Looks up a torch name, with or without a leading "torch.".  INVALID names the text. */
wsync_status_t wsync_dtype_from_name(const char *name, wsync_dtype_t *dtype,
                                     wsync_error_t *err);

/* The transform that turns `source` elements into `destination` elements, computed or as
 * they are.  UNSUPPORTED names both types where there is none. */
wsync_status_t wsync_dtype_transform(wsync_dtype_t source, wsync_dtype_t destination,
                                     bool computed, wsync_transform_t *transform,
                                     wsync_error_t *err);

#endif
