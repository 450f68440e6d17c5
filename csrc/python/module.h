/* SPDX-License-Identifier: Apache-2.0
 * Module state and what all Python types share.  Only files of csrc/python include
 * Python.h. */
#ifndef WSYNC_PYTHON_MODULE_H
#define WSYNC_PYTHON_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core/status.h"

/* Types that other files need to recognise or make: one slot of the module state each. */
#define WSYNC_TYPE_MAP(X) \
    X(TensorTable)        \
    X(Layout)             \
    X(Plan)               \
    X(Device)             \
    X(Route)              \
    X(Memory)             \
    X(Event)              \
    X(Stream)             \
    X(BufferTable)        \
    X(IpcMemory)

typedef struct ModuleState {
    PyObject *base_error; /* wsync.WsyncError */
#define WSYNC_STATE_ERROR(name, value, text, cls, base) PyObject *error_##name;
    WSYNC_STATUS_MAP(WSYNC_STATE_ERROR)
#undef WSYNC_STATE_ERROR
#define WSYNC_STATE_TYPE(name) PyTypeObject *type_##name;
    WSYNC_TYPE_MAP(WSYNC_STATE_TYPE)
#undef WSYNC_STATE_TYPE
    PyObject
        *dtype_codes; /* dict: torch.dtype object -> wsync_dtype_t, filled on first use */
    PyObject *exchange_apis; /* dict: tensor type -> DLPack exchange API capsule or None */
} ModuleState;

ModuleState *wsync_py_state(PyObject *module);
/* State from a type made by wsync_py_add_type; borrowed for the type's life. */
ModuleState *wsync_py_type_state(PyTypeObject *type);

/* Adds a function to a type as a static method that gets the module as its first argument:
 * METH_STATIC functions cannot reach the module state in the Limited API.  *method must be
 * static. */
int wsync_py_add_static(PyObject *module, PyTypeObject *type, PyMethodDef *method);

/* Raises the Python class of err->status with .status, .native and .origin; returns NULL.
 */
PyObject *wsync_py_raise(ModuleState *state, const wsync_error_t *err);

/* Makes a heap type, adds it to the module and stores it in *slot (NULL allowed). */
int wsync_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);

int wsync_py_add_errors(PyObject *module);

/* Waits in slices of at most 50 ms with the GIL released, letting signals in and calling
 * `check` (a callable or None; it raises to end the wait) between them.  step returns
 * WSYNC_ERR_TIMEOUT to be called again.  Returns 0, or -1 with an exception set. */
typedef wsync_status_t (*wsync_py_step_func_t)(void *context, int timeout_ms,
                                               wsync_error_t *err);
int wsync_py_wait(ModuleState *state, wsync_py_step_func_t step, void *context,
                  double timeout, PyObject *check);

/* One function a file: adds the file's types to the module. */
#define WSYNC_REGISTER_MAP(X) \
    X(tensors)                \
    X(describe)               \
    X(held)                   \
    X(device)                 \
    X(stream)                 \
    X(checksum)               \
    X(counter)                \
    X(cuda)                   \
    X(cuda_ipc)               \
    X(exporter)               \
    X(importer)               \
    X(comm)                   \
    X(layout)                 \
    X(builder)                \
    X(route)                  \
    X(plan)                   \
    X(views)                  \
    X(pack)                   \
    X(file)

#define WSYNC_DECLARE_REGISTER(name) int wsync_py_register_##name(PyObject *module);
WSYNC_REGISTER_MAP(WSYNC_DECLARE_REGISTER)
#undef WSYNC_DECLARE_REGISTER

#endif
