/* SPDX-License-Identifier: Apache-2.0
 * The extension module: state, registration, the one place that waits. */
#include "python/module.h"

#include <time.h>

#ifndef WSYNC_VERSION
#error "WSYNC_VERSION comes from the build"
#endif

enum { WAIT_SLICE_MS = 50 };

ModuleState *wsync_py_state(PyObject *module)
{
    return PyModule_GetState(module);
}

ModuleState *wsync_py_type_state(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

int wsync_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);

    if (type == NULL) {
        return -1;
    }
    if (PyModule_AddType(module, (PyTypeObject *)type) < 0) {
        Py_DECREF(type);
        return -1;
    }
    if (slot != NULL) {
        *slot = (PyTypeObject *)type; /* moved into the module state */
    } else {
        Py_DECREF(type);
    }
    return 0;
}

int wsync_py_add_static(PyObject *module, PyTypeObject *type, PyMethodDef *method)
{
    PyObject *function = PyCFunction_NewEx(method, module, NULL);
    int result = -1;

    if (function != NULL) {
        result = PyObject_SetAttrString((PyObject *)type, method->ml_name, function);
        Py_DECREF(function);
    }
    return result;
}

static double monotonic_seconds(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int wsync_py_wait(ModuleState *state, wsync_py_step_func_t step, void *context,
                  double timeout, PyObject *check)
{
    const double deadline = monotonic_seconds() + timeout;

    for (;;) {
        wsync_error_t err = {0};
        wsync_status_t status;
        const double left = deadline - monotonic_seconds();
        int slice = WAIT_SLICE_MS;

        if (left * 1000.0 < (double)slice) {
            slice = left > 0.0 ? (int)(left * 1000.0) + 1 : 0;
        }
        Py_BEGIN_ALLOW_THREADS
            status = step(context, slice, &err);
        Py_END_ALLOW_THREADS
        if (status == WSYNC_OK) {
            return 0;
        }
        if (status != WSYNC_ERR_TIMEOUT) {
            (void)wsync_py_raise(state, &err);
            return -1;
        }
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        if (check != NULL && check != Py_None) {
            PyObject *result = PyObject_CallNoArgs(check);

            if (result == NULL) {
                return -1;
            }
            Py_DECREF(result);
        }
        if (!(monotonic_seconds() < deadline)) { /* a NaN is no deadline to wait for */
            (void)wsync_py_raise(state, &err);
            return -1;
        }
    }
}

static int module_exec(PyObject *module)
{
    ModuleState *state = wsync_py_state(module);

    if (wsync_py_add_errors(module) < 0) {
        return -1;
    }
    state->dtype_codes = PyDict_New();
    state->exchange_apis = PyDict_New();
    if (state->dtype_codes == NULL || state->exchange_apis == NULL) {
        return -1;
    }
#define CALL_REGISTER(name)                     \
    if (wsync_py_register_##name(module) < 0) { \
        return -1;                              \
    }
    WSYNC_REGISTER_MAP(CALL_REGISTER)
#undef CALL_REGISTER
    return PyModule_AddStringConstant(module, "__version__", WSYNC_VERSION);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    ModuleState *state = wsync_py_state(module);

    Py_VISIT(state->base_error);
#define VISIT_ERROR(name, value, text, cls, base) Py_VISIT(state->error_##name);
    WSYNC_STATUS_MAP(VISIT_ERROR)
#undef VISIT_ERROR
#define VISIT_TYPE(name) Py_VISIT(state->type_##name);
    WSYNC_TYPE_MAP(VISIT_TYPE)
#undef VISIT_TYPE
    Py_VISIT(state->dtype_codes);
    Py_VISIT(state->exchange_apis);
    return 0;
}

static int module_clear(PyObject *module)
{
    ModuleState *state = wsync_py_state(module);

    Py_CLEAR(state->base_error);
#define CLEAR_ERROR(name, value, text, cls, base) Py_CLEAR(state->error_##name);
    WSYNC_STATUS_MAP(CLEAR_ERROR)
#undef CLEAR_ERROR
#define CLEAR_TYPE(name) Py_CLEAR(state->type_##name);
    WSYNC_TYPE_MAP(CLEAR_TYPE)
#undef CLEAR_TYPE
    Py_CLEAR(state->dtype_codes);
    Py_CLEAR(state->exchange_apis);
    return 0;
}

static void module_free(void *module)
{
    (void)module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,         .m_name = "wsync._core", .m_doc = "The C core of wsync.",
    .m_size = sizeof(ModuleState), .m_slots = module_slots, .m_traverse = module_traverse,
    .m_clear = module_clear,       .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
