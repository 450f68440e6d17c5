/* SPDX-License-Identifier: Apache-2.0 */
#include "python/guard.h"

int wsync_py_guard_enter(ModuleState *state, wsync_py_guard_t *guard, const char *name)
{
    if (guard->closed || guard->busy) {
        (void)wsync_py_fail(state, WSYNC_ERR_STATE, name, "%s %s", name,
                            guard->closed ? "is closed" : "is in use by another call");
        return -1;
    }
    guard->busy = true;
    return 0;
}

void wsync_py_guard_leave(wsync_py_guard_t *guard)
{
    guard->busy = false;
}

int wsync_py_guarded_wait(ModuleState *state, wsync_py_guard_t *guard, const char *name,
                          wsync_py_step_func_t step, void *context, double timeout,
                          PyObject *check)
{
    int result;

    if (wsync_py_guard_enter(state, guard, name) < 0) {
        return -1;
    }
    result = wsync_py_wait(state, step, context, timeout, check);
    wsync_py_guard_leave(guard);
    return result;
}

int wsync_py_convert_u64(PyObject *object, void *value)
{
    const unsigned long long converted = PyLong_AsUnsignedLongLong(object);

    if (converted == (unsigned long long)-1 && PyErr_Occurred()) {
        return 0;
    }
    *(uint64_t *)value = converted;
    return 1;
}

int wsync_py_convert_u32(PyObject *object, void *value)
{
    uint64_t converted = 0;

    if (!wsync_py_convert_u64(object, &converted)) {
        return 0;
    }
    if (converted > UINT32_MAX) {
        (void)PyErr_Format(PyExc_OverflowError, "%llu does not fit 32 bits",
                           (unsigned long long)converted);
        return 0;
    }
    *(uint32_t *)value = (uint32_t)converted;
    return 1;
}

void wsync_py_assign(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;

    *slot = value;
    Py_XDECREF(old);
}
