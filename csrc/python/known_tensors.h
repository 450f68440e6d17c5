/* SPDX-License-Identifier: Apache-2.0
 * Tensors that a former table has described, and what is left to ask of them. */
#ifndef WSYNC_PYTHON_KNOWN_TENSORS_H
#define WSYNC_PYTHON_KNOWN_TENSORS_H

#include "python/cached_methods.h"
#include "python/tensor_table.h"

/* What tensors and storages are asked. */
typedef struct wsync_py_questions {
    wsync_py_question_t is_conj;
    wsync_py_question_t is_neg;
    wsync_py_question_t untyped_storage;
    wsync_py_question_t data_ptr; /* these two of storages */
    wsync_py_question_t nbytes;
} wsync_py_questions_t;

wsync_py_questions_t wsync_py_questions(const ModuleState *state);

/* Whether a tensor is still where a row says, and seen as it says; false also where more
 * has to be asked, as of wrappers and empty tensors.  api: of the tensor's type.  gpu: of
 * the row's table.  Leaves no exception. */
bool wsync_py_same_place(const DLPackExchangeAPI *api, PyObject *tensor,
                         const wsync_tensor_row_t *row, int gpu);

/* The storage that a row of a former table's form lies in, new, if all that the row says of
 * the tensor still holds, and its memory is the storage's; else NULL, with an exception if
 * one is not to be dropped (wsync_py_refused).  The form has `storages`.  seen: one that
 * was found so for a tensor before, or NULL. */
PyObject *wsync_py_known_storage(wsync_py_questions_t *questions,
                                 const DLPackExchangeAPI *api,
                                 const TensorTableObject *former, Py_ssize_t index,
                                 PyObject *tensor, const PyObject *seen);

/* Weak references to the storages of a table, which owns them, for its form: a new tuple,
 * or NULL without an exception where there are none to be had. */
PyObject *wsync_py_weak_storages(const TensorTableObject *table);

#endif
