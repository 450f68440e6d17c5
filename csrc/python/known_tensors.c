/* SPDX-License-Identifier: Apache-2.0
 * Tensors that a former table has described: whether that still holds is asked in fewer
 * calls than describing them takes.  A form keeps weak references to storages alone: torch
 * keeps the object of a storage as long as that is in use. */
#include "python/known_tensors.h"

#include <string.h>

/* Whether what DLPack says is what a row says.  Each dtype has a code of its own there. */
static bool same_view(const DLTensor *view, const wsync_tensor_row_t *row, int gpu)
{
    const DLDataType dtype = wsync_py_dlpack_dtype(row->dtype);
    const bool on_gpu = view->device.device_type == kDLCUDA;

    if (view->data == NULL || (char *)view->data + view->byte_offset != (char *)row->data ||
        view->ndim != (int32_t)row->ndim || view->dtype.code != dtype.code ||
        view->dtype.bits != dtype.bits || view->dtype.lanes != dtype.lanes ||
        on_gpu != row->on_gpu || (on_gpu && view->device.device_id != gpu) ||
        (!on_gpu && view->device.device_type != kDLCPU &&
         view->device.device_type != kDLCUDAHost)) {
        return false;
    }
    /* whether it may leave them out is not asked again here, but where tables are made */
    if (row->ndim > 0 && (view->shape == NULL || view->strides == NULL)) {
        return false;
    }
    for (uint32_t i = 0; i < row->ndim; i++) {
        if (view->shape[i] != row->shape[i] ||
            (view->strides[i] != row->stride[i] && row->shape[i] != 1)) {
            return false;
        }
    }
    return true;
}

bool wsync_py_same_place(const DLPackExchangeAPI *api, PyObject *tensor,
                         const wsync_tensor_row_t *row, int gpu)
{
    DLTensor view;

    if (row->type != (const void *)Py_TYPE(tensor) || row->nbytes == 0 || api == NULL ||
        api->dltensor_from_py_object_no_sync == NULL) {
        return false;
    }
    if (api->dltensor_from_py_object_no_sync(tensor, &view) != 0) {
        PyErr_Clear();
        return false;
    }
    return same_view(&view, row, gpu);
}

wsync_py_questions_t wsync_py_questions(const ModuleState *state)
{
    return (wsync_py_questions_t){.is_conj.name = state->name_is_conj,
                                  .is_neg.name = state->name_is_neg,
                                  .untyped_storage.name = state->name_untyped_storage,
                                  .data_ptr.name = state->name_data_ptr,
                                  .nbytes.name = state->name_nbytes};
}

/* Whether a method answers False. */
static bool denies(PyObject *tensor, wsync_py_question_t *method)
{
    PyObject *answer = wsync_py_ask(method, tensor);
    const bool denied = answer == Py_False;

    (void)wsync_py_refused();
    Py_XDECREF(answer);
    return denied;
}

/* Whether a storage has the memory that a row says, and as much of it: one that was made
 * smaller may lie where it lay. */
static bool same_memory(wsync_py_questions_t *questions, PyObject *storage,
                        const wsync_tensor_row_t *row)
{
    const bool same =
        wsync_py_ask_number(&questions->data_ptr, storage) == row->storage &&
        wsync_py_ask_number(&questions->nbytes, storage) == row->storage_nbytes &&
        PyErr_Occurred() == NULL;

    (void)wsync_py_refused();
    return same;
}

/* The storage of a row, if it still has its memory: new. */
static PyObject *same_storage(wsync_py_questions_t *questions, PyObject *weak,
                              const wsync_tensor_row_t *row, const PyObject *seen)
{
    PyObject *storage = Py_NewRef(PyWeakref_GetObject(weak));

    if (storage == seen && seen != NULL) {
        return storage;
    }
    if (storage == Py_None || !same_memory(questions, storage, row)) {
        Py_CLEAR(storage);
    }
    return storage;
}

PyObject *wsync_py_known_storage(wsync_py_questions_t *questions,
                                 const DLPackExchangeAPI *api,
                                 const TensorTableObject *former, Py_ssize_t index,
                                 PyObject *tensor, const PyObject *seen)
{
    const wsync_tensor_row_t *row = &former->rows[index];
    const bool has_conj =
        row->dtype == WSYNC_DTYPE_COMPLEX64 || row->dtype == WSYNC_DTYPE_COMPLEX128;

    if (!wsync_py_same_place(api, tensor, row, former->gpu) ||
        (has_conj && !denies(tensor, &questions->is_conj)) ||
        !denies(tensor, &questions->is_neg)) {
        return NULL;
    }
    return same_storage(questions, PyTuple_GetItem(former->storages, index), row, seen);
}

PyObject *wsync_py_weak_storages(const TensorTableObject *table)
{
    PyObject *storages;
    int collects;

    /* the tensors come first, and one storage for each: else two tables were joined */
    if (table->owners == NULL || PyList_Size(table->owners) != table->count + 1) {
        return NULL;
    }
    collects = PyGC_Disable(); /* see describe_undisturbed() */
    storages = PyTuple_New(table->count);
    for (Py_ssize_t i = 0; storages != NULL && i < table->count; i++) {
        PyObject *weak = PyWeakref_NewRef(PyList_GetItem(table->owners, i + 1), NULL);

        if (weak == NULL) { /* an object that stands for a storage */
            Py_CLEAR(storages);
        } else {
            PyTuple_SetItem(storages, i, weak);
        }
    }
    PyErr_Clear();
    if (collects) {
        (void)PyGC_Enable();
    }
    return storages;
}
