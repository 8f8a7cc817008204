// Launches of one compiled kernel, as a Python function; see ubatch/kernels/direct_launch.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

// `MOST` parameters of a kernel.
enum { WARP = 32, MAP_BYTES = 128, MAP_ALIGNMENT = 64, TRITONS = -1 };  // the last: this launch is for Triton

// `cuLaunchKernel`: 0 is success.
typedef int Driver(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **params, void **extra);

typedef struct {
    Driver *driver;
    void *function;
    unsigned threads, shared;
    Py_ssize_t count;
    char kinds[];  // of the arguments: see `_KINDS` in direct_launch.py
} Kernel;

typedef struct {
    int count;
    uint64_t values[MOST];
    void *params[MOST];  // what the driver reads: addresses of values, or of a tensor map
} Params;

static int add(Params *to, PyObject *number) {
    if (to->count == MOST) return PyErr_SetString(PyExc_ValueError, "a kernel has too many parameters."), 0;
    // Of a shorter parameter the driver reads the first bytes only.
    to->values[to->count] = PyLong_AsUnsignedLongLongMask(number);
    to->params[to->count] = &to->values[to->count];
    to->count++;
    return !PyErr_Occurred();
}

static int add_float(Params *to, PyObject *number) {
    const float value = (float)PyFloat_AsDouble(number);
    if (PyErr_Occurred() || !add(to, Py_False)) return 0;
    memcpy(&to->values[to->count - 1], &value, sizeof value);
    return 1;
}

// Where the encoded map lies in the first of these objects, Triton's, which ends with it; 0 if that is of another kind.
static void *encoded(PyObject *map) {
    if (!PyTuple_Check(map) || !PyTuple_GET_SIZE(map)) return 0;
    PyObject *object = PyTuple_GET_ITEM(map, 0);
    char *at = (char *)object + Py_TYPE(object)->tp_basicsize - MAP_BYTES;
    return at > (char *)object && (uintptr_t)at % MAP_ALIGNMENT == 0 ? at : 0;
}

// The encoded map, and the sizes and strides that Triton passes beside it.
static int add_map(Params *to, PyObject *map) {
    if (!add(to, Py_False)) return 0;
    to->params[to->count - 1] = encoded(map);
    for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(map); i++)
        if (!add(to, PyTuple_GET_ITEM(map, i))) return 0;
    return 1;
}

// (x, y, z, stream, *arguments) -> 0; or `TRITONS`, or the driver's error, which may be that of earlier work. Then nothing
// was launched.
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    const Kernel *kernel = PyCapsule_GetPointer(self, 0);
    if (!kernel) return 0;
    if (given != kernel->count + 4) return PyErr_Format(PyExc_TypeError, "%zd arguments were given.", given);
    Params params;
    params.count = 0;
    long grid[3];
    for (int i = 0; i < 3; i++) grid[i] = PyLong_AsLong(args[i]);
    void *stream = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred()) return 0;
    for (int i = 0; i < 3; i++)
        if (grid[i] < 0 || grid[i] > INT32_MAX) return PyLong_FromLong(TRITONS);
    args += 4;
    for (Py_ssize_t i = 0; i < kernel->count; i++) {
        int good = 1;
        switch (kernel->kinds[i]) {
            case 'p':
                if (!PyLong_Check(args[i])) return PyLong_FromLong(TRITONS);
                // fall through
            case 'i': good = add(&params, args[i]); break;
            case 'f': good = add_float(&params, args[i]); break;
            case 'm':
                if (!encoded(args[i])) return PyLong_FromLong(TRITONS);
                good = add_map(&params, args[i]);
                break;
        }
        if (!good) return 0;
    }
    add(&params, Py_False);  // the global scratch memory, and the profiler's: none
    if (!add(&params, Py_False)) return 0;
    if (!grid[0] || !grid[1] || !grid[2]) return PyLong_FromLong(0);
    int error;
    Py_BEGIN_ALLOW_THREADS;  // the driver waits if too much is queued
    error = kernel->driver(kernel->function, (unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2], kernel->threads, 1, 1,
                           kernel->shared, stream, params.params, 0);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(error);
}

static PyMethodDef definition = {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, 0};

static void release(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, 0)); }

// (address of the driver's function, kernel, warps, bytes of shared memory, kinds) -> the function.
PyObject *launcher(PyObject *args) {
    unsigned long long driver, function;
    unsigned warps, shared;
    const char *kinds;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "KKIIy#", &driver, &function, &warps, &shared, &kinds, &count)) return 0;
    Kernel *kernel = PyMem_Malloc(sizeof *kernel + count);
    if (!kernel) return PyErr_NoMemory();
    *kernel = (Kernel){(Driver *)(uintptr_t)driver, (void *)(uintptr_t)function, warps * WARP, shared, count};
    memcpy(kernel->kinds, kinds, count);
    PyObject *self = PyCapsule_New(kernel, 0, release);
    if (!self) return PyMem_Free(kernel), (PyObject *)0;
    PyObject *made = PyCFunction_New(&definition, self);
    Py_DECREF(self);
    return made;
}
