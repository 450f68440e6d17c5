/* SPDX-License-Identifier: Apache-2.0
 * Calls of methods that are written in C, without Python's search for them: torch answers
 * such questions in a few nanoseconds, and the search took most of the time. */
#include "python/cached_methods.h"

/* -1 with an exception where the object has no such method. */
static int look_up(wsync_py_question_t *method, PyObject *object)
{
    PyObject *bound = PyObject_GetAttr(object, method->name);

    if (bound == NULL) {
        return -1;
    }
    method->type = Py_TYPE(object);
    method->function = NULL;
    if (Py_IS_TYPE(bound, &PyCFunction_Type) && PyCFunction_GetSelf(bound) == object &&
        PyCFunction_GetFlags(bound) == METH_NOARGS) {
        method->function = PyCFunction_GetFunction(bound);
    }
    Py_DECREF(bound);
    return 0;
}

PyObject *wsync_py_ask(wsync_py_question_t *method, PyObject *object)
{
    if (Py_TYPE(object) != method->type && look_up(method, object) < 0) {
        return NULL;
    }
    return method->function != NULL
               ? method->function(object, NULL)
               : PyObject_CallMethodObjArgs(object, method->name, NULL);
}

uint64_t wsync_py_ask_number(wsync_py_question_t *method, PyObject *object)
{
    PyObject *answer = wsync_py_ask(method, object);
    /* the one that checks the range takes three times as long */
    const uint64_t number = answer != NULL ? PyLong_AsUnsignedLongLongMask(answer) : 0;

    Py_XDECREF(answer);
    return PyErr_Occurred() ? 0 : number;
}
