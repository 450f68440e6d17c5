/* SPDX-License-Identifier: Apache-2.0
 * Calls of methods that are written in C, without Python's search for them: torch answers
 * such questions in a few nanoseconds, and the search took most of the time. */
#include "python/methods.h"

static PyCFunction find_function(PyObject *object, PyObject *name)
{
    PyObject *bound = PyObject_GetAttr(object, name);
    PyCFunction function = NULL;

    if (bound != NULL && Py_IS_TYPE(bound, &PyCFunction_Type) &&
        PyCFunction_GetSelf(bound) == object &&
        PyCFunction_GetFlags(bound) == METH_NOARGS) {
        function = PyCFunction_GetFunction(bound);
    }
    PyErr_Clear();
    Py_XDECREF(bound);
    return function;
}

PyObject *wsync_py_ask(wsync_py_method_t *method, PyObject *object)
{
    if (Py_TYPE(object) != method->type) {
        method->function = find_function(object, method->name);
        method->type = Py_TYPE(object);
    }
    return method->function != NULL
               ? method->function(object, NULL)
               : PyObject_CallMethodObjArgs(object, method->name, NULL);
}

uint64_t wsync_py_ask_number(wsync_py_method_t *method, PyObject *object)
{
    PyObject *answer = wsync_py_ask(method, object);
    /* the one that checks the range takes three times as long */
    const uint64_t number = answer != NULL ? PyLong_AsUnsignedLongLongMask(answer) : 0;

    Py_XDECREF(answer);
    return PyErr_Occurred() ? 0 : number;
}
