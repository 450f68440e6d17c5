/* SPDX-License-Identifier: Apache-2.0
 * Numbers, tuples and copies between Python and C. */
#ifndef WSYNC_PYTHON_CONVERT_H
#define WSYNC_PYTHON_CONVERT_H

#include "python/module.h"

#include <stdint.h>

#include "core/copy.h"
#include "core/layout/box.h"

/* Reads at most WSYNC_MAX_NDIM integers from a sequence; `what` names it in errors. Entries
 * at *count and beyond are left alone.  Returns 0, or -1 with an exception set. */
int wsync_py_read_int64s(PyObject *sequence, const char *what,
                         int64_t values[WSYNC_MAX_NDIM], uint32_t *count);

/* The same where the number of integers is known. */
int wsync_py_read_exactly(PyObject *sequence, const char *what,
                          int64_t values[WSYNC_MAX_NDIM], uint32_t count);

/* Reads an index below `count`: IndexError names it. */
int wsync_py_read_index(PyObject *object, size_t count, const char *what, size_t *index);

/* TypeError, and -1, unless an object is of a type of the module. */
int wsync_py_check_type(PyObject *object, PyTypeObject *type, const char *what);

/* Checks that a number fits: 0 <= value <= UINT32_MAX. */
int wsync_py_read_u32(long long value, const char *what, uint32_t *result);

/* The UTF-8 of a str, borrowed from it; `what` names it in errors.  NULL with TypeError for
 * another object, and with ValueError for a str that is no C string. */
const char *wsync_py_read_text(ModuleState *state, PyObject *object, const char *what);

/* Converters for "O&" into uint32_t and uint64_t: OverflowError where the value does not
 * fit ("I" and "K" would take it modulo the size). */
int wsync_py_convert_u32(PyObject *object, void *value);
int wsync_py_convert_u64(PyObject *object, void *value);

/* Converter for "O&" into void *: an address as an integer. */
int wsync_py_convert_address(PyObject *object, void *value);

/* A capsule around a new record of `nbytes`, all zero, for the caller to fill: *record is
 * borrowed from it.  `destroy` releases what the record holds and frees it.  NULL with an
 * exception. */
PyObject *wsync_py_capsule_new(size_t nbytes, const char *name,
                               PyCapsule_Destructor destroy, void **record);

/* Moves `value` into *slot, then drops the reference that *slot held.  In this order,
 * because dropping it may run Python code that sees *slot. */
void wsync_py_assign(PyObject **slot, PyObject *value);

PyObject *wsync_py_int64_tuple(const int64_t *values, uint32_t count);

/* Puts a value, which is moved, at a place of a new list.  If the value is NULL the list is
 * released and *list is NULL from here on. */
void wsync_py_list_put(PyObject **list, size_t index, PyObject *value);

/* The items of a Python sequence as an array of C items. */
typedef struct wsync_py_items {
    void *items;
    size_t count;
    PyObject *tuple; /* keeps what the items borrow */
} wsync_py_items_t;

/* Reads one object into an item that is all zero; -1 with an exception. */
typedef int (*wsync_py_read_func_t)(const void *context, PyObject *object, size_t index,
                                    void *item);

/* Reads a sequence (NULL: an empty one).  -1 with an exception: there is nothing to
 * release. */
int wsync_py_items_init(wsync_py_items_t *items, PyObject *sequence, size_t item_nbytes,
                        wsync_py_read_func_t read, const void *context);
/* The same for texts: the items are const char *, and `what[index]` names each in
 * errors. */
int wsync_py_items_init_texts(wsync_py_items_t *items, ModuleState *state,
                              PyObject *sequence, const char *what);
void wsync_py_items_fini(wsync_py_items_t *items);

/* A list of CopyTuple as wsync/_core.pyi has it. */
PyObject *wsync_py_copy_list(const wsync_copy_t *copies, size_t count);

#endif
