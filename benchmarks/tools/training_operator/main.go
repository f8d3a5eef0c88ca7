// The PyTorchJob controller of Kubeflow's training-operator, for `make bench-operator`.
//
// Its own program has no flag for the limit of requests (20 a second for each client), and waits for the certificates
// of its webhooks in a folder of /tmp. This one takes the limit as a flag and serves no webhook. The controller, its
// cache, its clients and its log are set up as in cmd/training-operator.v1/main.go.
package main

import (
	"flag"

	"go.uber.org/zap/zapcore"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/flowcontrol"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	kubeflowv1 "github.com/kubeflow/training-operator/pkg/apis/kubeflow.org/v1"
	"github.com/kubeflow/training-operator/pkg/config"
	"github.com/kubeflow/training-operator/pkg/controller.v1/common"
	"github.com/kubeflow/training-operator/pkg/controller.v1/pytorch"
)

func main() {
	metrics := flag.String("metrics-bind-address", ":8080", "where the metrics are served")
	threads := flag.Int("controller-threads", 1, "jobs reconciled at the same time")
	qps := flag.Float64("qps", 20, "requests a second")
	burst := flag.Int("burst", 30, "requests that may exceed the rate")
	inAll := flag.Bool("limit-in-all", false, "the limit applies to all clients together, not to each")
	options := zap.Options{Development: true, StacktraceLevel: zapcore.DPanicLevel}
	options.BindFlags(flag.CommandLine)
	flag.Parse()
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&options)))

	config.Config.PyTorchInitContainerImage = config.PyTorchInitContainerImageDefault
	config.Config.PyTorchInitContainerTemplateFile = config.PyTorchInitContainerTemplateFileDefault
	config.Config.PyTorchInitContainerMaxTries = config.PyTorchInitContainerMaxTriesDefault

	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(kubeflowv1.AddToScheme(scheme))

	server := ctrl.GetConfigOrDie()
	server.QPS, server.Burst = float32(*qps), *burst
	if *inAll {
		server.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(server.QPS, server.Burst)
	}
	manager, err := ctrl.NewManager(server, ctrl.Options{
		Scheme:                 scheme,
		Metrics:                metricsserver.Options{BindAddress: *metrics},
		HealthProbeBindAddress: "0",
	})
	utilruntime.Must(err)
	reconciler := pytorch.NewReconciler(manager, common.GenNonGangSchedulerSetupFunc())
	utilruntime.Must(reconciler.SetupWithManager(manager, *threads))
	utilruntime.Must(manager.Start(ctrl.SetupSignalHandler()))
}
