import java.lang.reflect.Field;
import java.lang.reflect.Modifier;

/** Prints the plain fields of new clients: class, field, value. Run with the client's jars. */
public class Defaults {
    private static final String[] KINDS = {
        "producer.DefaultMQProducer", "consumer.DefaultMQPushConsumer",
        "consumer.DefaultLitePullConsumer", "consumer.DefaultMQPullConsumer"};
    /** What differs from machine to machine and from run to run. */
    private static final String OF_THE_MACHINE =
        "consumeTimestamp|clientIP|namesrvAddr|socksProxyConfig|instanceName|clientCallback.*";

    public static void main(String[] arguments) throws Exception {
        for (String kind : KINDS) {
            Class<?> made = Class.forName("org.apache.rocketmq.client." + kind);
            Object client = made.getConstructor(String.class).newInstance("g");
            for (Class<?> one = made; one != Object.class; one = one.getSuperclass()) {
                for (Field field : one.getDeclaredFields()) {
                    Class<?> type = field.getType();
                    boolean plain = type.isPrimitive() || type.isEnum() || type == String.class;
                    boolean shown = plain && !Modifier.isStatic(field.getModifiers());
                    if (!shown || field.getName().matches(OF_THE_MACHINE)) {
                        continue;
                    }
                    field.setAccessible(true);
                    System.out.println(
                        made.getSimpleName() + " " + field.getName() + " " + field.get(client));
                }
            }
        }
        System.exit(0);
    }
}
