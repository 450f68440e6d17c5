/* SPDX-License-Identifier: Apache-2.0
 * Exceptions: one class per status code, made from the table in core/base/status.h. */
#include "python/module.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct error_class {
    wsync_status_t status;
    const char *name;
    const char *doc;
    PyObject *builtin; /* borrowed */
    PyObject **slot;
} error_class_t;

/* Exceptions must survive pickling (Ray, multiprocessing): arguments in args, attributes in
 * __dict__, both of which BaseException.__reduce__ already carries. */
static int add_error(PyObject *module, PyObject *base, const error_class_t *error)
{
    PyObject *bases = PyTuple_Pack(2, base, error->builtin);
    PyObject *dict = PyDict_New();
    PyObject *type = NULL;
    PyObject *code = PyLong_FromLong(error->status);
    int result = -1;
    char name[64];

    if (bases == NULL || dict == NULL || code == NULL ||
        PyDict_SetItemString(dict, "status", code) < 0) {
        goto cleanup;
    }
    (void)PyOS_snprintf(name, sizeof(name), "wsync._core.%s", error->name);
    type = PyErr_NewExceptionWithDoc(name, error->doc, bases, dict);
    if (type == NULL || PyModule_AddObjectRef(module, error->name, type) < 0) {
        goto cleanup;
    }
    *error->slot = type;
    type = NULL; /* moved into the module state */
    result = 0;

cleanup:
    Py_XDECREF(bases);
    Py_XDECREF(dict);
    Py_XDECREF(code);
    Py_XDECREF(type);
    return result;
}

int wsync_py_add_errors(PyObject *module)
{
    ModuleState *state = wsync_py_state(module);
    PyObject *defaults =
        Py_BuildValue("{s:i,s:i,s:s}", "status", 0, "native", 0, "origin", "");

    if (defaults == NULL) {
        return -1;
    }
    state->base_error = PyErr_NewExceptionWithDoc(
        "wsync._core.WsyncError",
        "Base of all errors of wsync.\n\n"
        "status: code of the failure; native: errno or driver code, 0 if none;\n"
        "origin: the call or module that found it.",
        NULL, defaults);
    Py_DECREF(defaults);
    if (state->base_error == NULL ||
        PyModule_AddObjectRef(module, "WsyncError", state->base_error) < 0) {
        return -1;
    }
#define ADD_ERROR(name, value, text, cls, base)                                  \
    {                                                                            \
        const error_class_t error = {WSYNC_ERR_##name, #cls, text, PyExc_##base, \
                                     &state->error_##name};                      \
        if (add_error(module, state->base_error, &error) < 0) {                  \
            return -1;                                                           \
        }                                                                        \
    }
    WSYNC_STATUS_MAP(ADD_ERROR)
#undef ADD_ERROR
    return 0;
}

PyObject *wsync_py_raise(ModuleState *state, const wsync_error_t *err)
{
    PyObject *type = state->base_error;
    PyObject *exception = NULL;
    PyObject *native = NULL;
    PyObject *origin = NULL;
    PyObject *message = NULL;
    const char *text;

    switch (err->status) {
    case WSYNC_OK:
        break;
#define PICK_ERROR(name, value, text, cls, base) \
    case WSYNC_ERR_##name:                       \
        type = state->error_##name;              \
        break;
        WSYNC_STATUS_MAP(PICK_ERROR)
#undef PICK_ERROR
    }
    /* Messages may carry a peer's text, or end in the middle of a character. */
    text = err->message[0] != '\0' ? err->message : wsync_status_text(err->status);
    message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    exception = message != NULL ? PyObject_CallFunctionObjArgs(type, message, NULL) : NULL;
    native = PyLong_FromLong(err->native);
    origin = PyUnicode_FromString(err->origin != NULL ? err->origin : "");
    if (exception != NULL && native != NULL && origin != NULL &&
        PyObject_SetAttrString(exception, "native", native) == 0 &&
        PyObject_SetAttrString(exception, "origin", origin) == 0) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    }
    Py_XDECREF(message);
    Py_XDECREF(exception);
    Py_XDECREF(native);
    Py_XDECREF(origin);
    return NULL;
}

void *wsync_py_fail(ModuleState *state, wsync_status_t status, const char *origin,
                    const char *format, ...)
{
    wsync_error_t err = {.status = status, .origin = origin};
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(err.message, sizeof(err.message), format, arguments);
    va_end(arguments);
    return wsync_py_raise(state, &err);
}

PyObject *wsync_py_none(ModuleState *state, wsync_status_t status, const wsync_error_t *err)
{
    return status == WSYNC_OK ? Py_NewRef(Py_None) : wsync_py_raise(state, err);
}
