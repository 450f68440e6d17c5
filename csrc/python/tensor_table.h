/* SPDX-License-Identifier: Apache-2.0
 * TensorTable: addresses, shapes and strides of torch tensors, read through DLPack's C
 * exchange API, and the tensors. */
#ifndef WSYNC_PYTHON_TENSOR_TABLE_H
#define WSYNC_PYTHON_TENSOR_TABLE_H

#include "python/module.h"

#include <stdbool.h>
#include <stdint.h>

#include "core/layout/box.h"
#include "core/layout/dtype.h"
#include "dlpack/dlpack.h"

/* One tensor; entries of shape and stride at ndim and beyond are 1 and 0.  Strides are
 * never negative; those that mean nothing (of extents of 1, and of tensors without
 * elements) are what contiguous memory has.  data may be NULL only where nbytes_spanned is
 * 0. */
typedef struct wsync_tensor_row {
    void *data; /* the first element; of a form, where it was */
    wsync_dtype_t dtype;
    uint32_t ndim;
    bool on_gpu;
    uint64_t nbytes;         /* of all elements */
    uint64_t nbytes_spanned; /* from data to the end of the last element */
    int64_t shape[WSYNC_MAX_NDIM];
    int64_t stride[WSYNC_MAX_NDIM]; /* elements */
} wsync_tensor_row_t;

/* Immutable.  Recognise it by ModuleState.type_TensorTable. */
typedef struct TensorTableObject {
    PyObject_HEAD
    PyObject *owners; /* owned list of the tensors and their storages; NULL in a form, whose
                       * rows are only compared */
    Py_ssize_t count;
    wsync_tensor_row_t *rows; /* owned; written by whoever makes the table */
    uint64_t nbytes;          /* of all elements of all tensors */
    int gpu;                  /* the one that some of them lie on; -1: none does */
    PyObject *names;          /* owned tuple, for messages; NULL: they have none */
    bool known;               /* all of it was known from a former table */
} TensorTableObject;

/* A table of `count` rows that are all zero, for the maker to fill. */
TensorTableObject *wsync_py_table_new(ModuleState *state, Py_ssize_t count);

/* Raises InvalidArgumentError and returns -1 for a form. */
int wsync_py_table_readable(ModuleState *state, const TensorTableObject *table);

/* Whether two rows have the same dtype, shape and strides. */
bool wsync_py_same_form(const wsync_tensor_row_t *one, const wsync_tensor_row_t *other);

/* TensorTable.moved(), which reads tensors as describe() does. */
PyObject *wsync_py_table_moved(PyObject *self, PyObject *sequence);

/* DLPack's description of a wsync dtype, which no other has. */
bool wsync_py_is_dtype(DLDataType described, wsync_dtype_t dtype);

/* The DLPack exchange API (major version 1) of a tensor's type: torch has it from 2.10 on.
 * NULL without an exception where there is none.  It lives for the whole process. */
const DLPackExchangeAPI *wsync_py_exchange_api(ModuleState *state, PyObject *tensor);

#endif
