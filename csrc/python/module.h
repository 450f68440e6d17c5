/* SPDX-License-Identifier: Apache-2.0
 * Module state and what all Python types share.  Only files of csrc/python include
 * Python.h. */
#ifndef WSYNC_PYTHON_MODULE_H
#define WSYNC_PYTHON_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core/base/status.h"

/* The module's types: each has a slot of the module state. */
#define WSYNC_TYPE_MAP(X) \
    X(TensorTable)        \
    X(Layout)             \
    X(LayoutBuilder)      \
    X(Plan)               \
    X(Device)             \
    X(Route)              \
    X(Quantiser)          \
    X(Memory)             \
    X(Event)              \
    X(Stream)             \
    X(BufferTable)        \
    X(IpcMemory)          \
    X(Exporter)           \
    X(Importer)           \
    X(Exchange)

/* Files that define functions of the module. */
#define WSYNC_FUNCTIONS_MAP(X) \
    X(describe)                \
    X(checksum)                \
    X(count_down)              \
    X(device)                  \
    X(exportable)              \
    X(nccl)                    \
    X(pack)                    \
    X(files)

/* What a type is made from: one constant in the type's file. */
typedef struct wsync_py_type {
    const char *name; /* "wsync._core.Route" */
    size_t nbytes;    /* of an object */
    unsigned flags;   /* besides Py_TPFLAGS_DEFAULT */
    PyType_Slot *slots;
    /* Static methods, or NULL.  They get the module as their first argument: METH_STATIC
     * functions cannot reach the module state in the Limited API. */
    PyMethodDef *static_methods;
    /* Adds what else belongs to the type, or NULL.  Returns 0, or -1 with an exception. */
    int (*finish)(PyObject *module, PyTypeObject *type);
} wsync_py_type_t;

#define WSYNC_DECLARE_TYPE(name) extern const wsync_py_type_t wsync_py_type_##name;
WSYNC_TYPE_MAP(WSYNC_DECLARE_TYPE)
#undef WSYNC_DECLARE_TYPE
#define WSYNC_DECLARE_FUNCTIONS(name) extern PyMethodDef wsync_py_functions_##name[];
WSYNC_FUNCTIONS_MAP(WSYNC_DECLARE_FUNCTIONS)
#undef WSYNC_DECLARE_FUNCTIONS

/* Names of attributes that are read from every torch tensor: interned in the state. */
#define WSYNC_NAME_MAP(X) \
    X(untyped_storage)    \
    X(__dlpack_c_exchange_api__)

/* Tuples with named fields that methods return (records.c). */
#define WSYNC_RECORD_MAP(X) \
    X(Shard)                \
    X(TensorInfo)           \
    X(Slot)                 \
    X(Message)

/* References only: module.c visits them as an array. */
typedef struct ModuleState {
    PyObject *base_error; /* wsync.WsyncError */
#define WSYNC_STATE_ERROR(name, value, text, cls, base) PyObject *error_##name;
    WSYNC_STATUS_MAP(WSYNC_STATE_ERROR)
#undef WSYNC_STATE_ERROR
#define WSYNC_STATE_TYPE(name) PyTypeObject *type_##name;
    WSYNC_TYPE_MAP(WSYNC_STATE_TYPE)
#undef WSYNC_STATE_TYPE
#define WSYNC_STATE_RECORD(name) PyTypeObject *record_##name;
    WSYNC_RECORD_MAP(WSYNC_STATE_RECORD)
#undef WSYNC_STATE_RECORD
#define WSYNC_STATE_NAME(name) PyObject *name_##name;
    WSYNC_NAME_MAP(WSYNC_STATE_NAME)
#undef WSYNC_STATE_NAME
} ModuleState;

ModuleState *wsync_py_state(PyObject *module);
/* State from one of the module's types; borrowed for the type's life. */
ModuleState *wsync_py_type_state(PyTypeObject *type);
/* The same from an object of such a type. */
ModuleState *wsync_py_state_of(PyObject *object);

/* The entry of a PyMethodDef for a function that takes keywords. */
#define WSYNC_PY_KEYWORDS(function) \
    ((PyCFunction)(void (*)(void))(function)), METH_VARARGS | METH_KEYWORDS

/* Defines `function`, the getter of an unsigned number: an expression of `self`. */
#define WSYNC_PY_NUMBER_GETTER(function, number)                        \
    static PyObject *function(PyObject *self, void *Py_UNUSED(closure)) \
    {                                                                   \
        return PyLong_FromUnsignedLongLong(number);                     \
    }

/* A new object of a type, all zero behind its head; NULL with an exception. */
PyObject *wsync_py_alloc(PyTypeObject *type);
/* A number that nothing else in the process has had: a stream may keep what it has found
 * out about an immutable object. */
uint64_t wsync_py_new_id(void);
/* The end of every tp_dealloc: frees the object and drops its reference to the type. */
void wsync_py_free(PyObject *self);

/* Raises the Python class of err->status with .status, .native and .origin; returns
 * NULL. */
PyObject *wsync_py_raise(ModuleState *state, const wsync_error_t *err);
/* The same for an error that is found in csrc/python; NULL fits every pointer. */
__attribute__((format(printf, 4, 5))) void *wsync_py_fail(ModuleState *state,
                                                          wsync_status_t status,
                                                          const char *origin,
                                                          const char *format, ...);
/* None, or what wsync_py_raise returns if `status` is not WSYNC_OK. */
PyObject *wsync_py_none(ModuleState *state, wsync_status_t status,
                        const wsync_error_t *err);

int wsync_py_add_errors(PyObject *module);
int wsync_py_add_records(PyObject *module);

/* A record of a type in the module state with the values of a tuple, which is moved; NULL
 * if that is NULL. */
PyObject *wsync_py_record(PyTypeObject *type, PyObject *values);

#endif
