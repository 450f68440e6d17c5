/* SPDX-License-Identifier: Apache-2.0
 * Methods without arguments that are called on many objects of a few types. */
#ifndef WSYNC_PYTHON_CACHED_METHODS_H
#define WSYNC_PYTHON_CACHED_METHODS_H

#include "python/module.h"

typedef struct wsync_py_question {
    PyObject *name;           /* borrowed from the module state */
    const PyTypeObject *type; /* of the last object, which is still there */
    PyCFunction function;     /* that this type has for it; NULL: none in C */
} wsync_py_question_t;

/* What the method of an object gives: new, or NULL with an exception.  Where a type has it
 * in C, an attribute of that name that an object of this type has of its own is not seen,
 * unless it is the first one of its type that is asked. */
PyObject *wsync_py_ask(wsync_py_question_t *method, PyObject *object);

/* The answer as a number, which is an address or a size; 0 also with an exception. */
uint64_t wsync_py_ask_number(wsync_py_question_t *method, PyObject *object);

#endif
