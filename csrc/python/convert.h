/* SPDX-License-Identifier: Apache-2.0
 * Numbers, tuples and copies between Python and C. */
#ifndef WSYNC_PYTHON_CONVERT_H
#define WSYNC_PYTHON_CONVERT_H

#include "python/module.h"

#include <stdint.h>

#include "core/box.h"
#include "core/copy.h"

/* Reads at most WSYNC_MAX_NDIM integers from a sequence; `what` names it in errors. Entries
 * at *count and beyond are left alone.  Returns 0, or -1 with an exception set. */
int wsync_py_read_int64s(PyObject *sequence, const char *what,
                         int64_t values[WSYNC_MAX_NDIM], uint32_t *count);

/* The same where the number of integers is known. */
int wsync_py_read_exactly(PyObject *sequence, const char *what,
                          int64_t values[WSYNC_MAX_NDIM], uint32_t count);

/* Checks that a number fits: 0 <= value <= UINT32_MAX. */
int wsync_py_read_u32(long long value, const char *what, uint32_t *result);

/* The UTF-8 of a str, borrowed from it; `what` names it in errors.  NULL with an exception
 * for what is no text, and with InvalidArgumentError for one with a null character, which
 * in C would be another, shorter text, or that has no UTF-8 (lone surrogates). */
const char *wsync_py_read_text(ModuleState *state, PyObject *object, const char *what);

PyObject *wsync_py_int64_tuple(const int64_t *values, uint32_t count);

/* A list of CopyTuple as wsync/_core.pyi has it. */
PyObject *wsync_py_copy_list(const wsync_copy_t *copies, size_t count);

#endif
