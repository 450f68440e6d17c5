/* SPDX-License-Identifier: Apache-2.0
 * Objects whose core half is for one thread at a time, while their calls let the GIL go;
 * and the numbers in their arguments. */
#ifndef WSYNC_PYTHON_GUARD_H
#define WSYNC_PYTHON_GUARD_H

#include <stdbool.h>
#include <stdint.h>

#include "python/module.h"

/* Guarded by the GIL. */
typedef struct wsync_py_guard {
    bool closed;
    bool busy; /* a call is under way, in another thread or below this one's check() */
} wsync_py_guard_t;

/* Raises StateError and returns -1 if the object is closed or in use; else it is in use
 * until leave.  `name` is the type's, for the message. */
int wsync_py_guard_enter(ModuleState *state, wsync_py_guard_t *guard, const char *name);
void wsync_py_guard_leave(wsync_py_guard_t *guard);

/* wsync_py_wait within enter and leave. */
int wsync_py_guarded_wait(ModuleState *state, wsync_py_guard_t *guard, const char *name,
                          wsync_py_step_func_t step, void *context, double timeout,
                          PyObject *check);

/* Converters for "O&" into uint32_t and uint64_t: OverflowError where the value does not
 * fit
 * ("I" and "K" would take it modulo the size). */
int wsync_py_convert_u32(PyObject *object, void *value);
int wsync_py_convert_u64(PyObject *object, void *value);

/* Gives up what *slot owned, after *slot owns `value`, which is moved. */
void wsync_py_assign(PyObject **slot, PyObject *value);

#endif
